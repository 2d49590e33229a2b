"""What tenants share of a worker's KV, and what a tenant keeps of it: keys with a share group, or a KV share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import httpx

from holdfast.v1 import session_pb2 as pb
from holdfast.v1 import session_pb2_grpc
from router.access.keys import Limits, StoredKey, new_key, write_keys
from tests.harness import ENGINE, Harness, running, until

PROMPT = list(range(100, 260))


def keyring(*tenants: tuple[str, Limits, str | None]) -> tuple[dict[str, str], list[StoredKey]]:
    made = {tenant: new_key(tenant, limits=limits, share_group=group) for tenant, limits, group in tenants}
    return {tenant: key for tenant, (key, _) in made.items()}, [stored for _, stored in made.values()]


async def cached(cluster: Harness, key: str, tokens: list[int], session: str = "") -> int:
    """Run a turn of one token, and tell how many of its input were cached."""
    async with cluster.channel() as channel:
        request = pb.GenerateRequest(
            session_id=session, tokens=pb.TokenIds(ids=tokens), sampling=pb.Sampling(max_tokens=1)
        )
        call = session_pb2_grpc.SessionServiceStub(channel).Generate(
            request, metadata=[("authorization", f"Bearer {key}")]
        )
        return max([response.cached_tokens async for response in call])


async def test_tenants_of_a_group_share_prefixes_and_nobody_else_does(tmp_path: Path) -> None:
    keys, stored = keyring(("a", Limits(), "g"), ("b", Limits(), "g"), ("c", Limits(), None))
    async with running(tmp_path, num_workers=1, api_keys=tuple(stored)) as cluster:
        assert await cached(cluster, keys["a"], PROMPT, "s") == 0
        assert await cached(cluster, keys["b"], PROMPT, "s") >= 144, "of the group, under the same id"
        assert await cached(cluster, keys["c"], PROMPT, "s") == 0
        async with httpx.AsyncClient(base_url=cluster.url, headers={"Authorization": f"Bearer {keys['b']}"}) as http:
            assert (await http.post("/flush_cache")).status_code == 200
        assert await cached(cluster, keys["a"], PROMPT) >= 144, "b's flush drops what b computed, which is nothing"
        await cluster.assert_no_leak()


async def test_a_tenant_that_joins_a_group_computes_its_session_again_in_it(tmp_path: Path) -> None:
    keys, stored = keyring(("a", Limits(), None), ("b", Limits(), "g"))
    write_keys(tmp_path / "keys", stored)
    async with running(tmp_path, num_workers=1, api_key_file=tmp_path / "keys") as cluster:
        await cached(cluster, keys["a"], PROMPT, "s")
        joined = [stored[0].model_copy(update={"share_group": "g"}), stored[1]]
        write_keys(tmp_path / "keys", joined)
        ring = cluster.router.core.keyring

        def took_over() -> bool:
            ring.identify(f"Bearer {keys['a']}")  # a request has the file read again
            return ring.scope_of("a").name == "group:g"

        await until(took_over, 10, "the router to read the keys")
        assert await cached(cluster, keys["a"], [7], "s") == 0
        assert await cached(cluster, keys["b"], PROMPT) >= 144
        await cluster.assert_no_leak()


async def test_a_tenant_beyond_its_share_leaves_the_others_sessions_where_they_are(tmp_path: Path) -> None:
    keys, stored = keyring(("big", Limits(kv_share=0.25), None), ("small", Limits(), None))
    engine = replace(ENGINE, max_total_tokens=1024)
    async with running(tmp_path, num_workers=1, engine=engine, api_keys=tuple(stored)) as cluster:
        await cached(cluster, keys["small"], PROMPT, "s")
        for number in range(12):
            await cached(cluster, keys["big"], [number, *PROMPT], f"s{number}")
        assert await cached(cluster, keys["small"], [7], "s") >= 160
        async with httpx.AsyncClient(base_url=cluster.url, headers={"Authorization": f"Bearer {keys['big']}"}) as http:
            body = {"prompt": [1] * 300, "max_tokens": 1, "model": "holdfast-tiny"}
            answer = await http.post("/v1/completions", json=body)
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
        assert "your share of a worker's KV" in answer.json()["error"]["message"]
        await cluster.assert_no_leak()
