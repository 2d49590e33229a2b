"""A tenant cannot tell by the time whether another has computed a prefix (law L15).

Two kinds of turns alternate at random in pairs, so that whatever else a machine does strikes both kinds alike. If they
take the same time, which one of a pair is faster is a fair coin.
"""

from __future__ import annotations

import random
import time
from math import comb
from pathlib import Path

from holdfast.v1 import session_pb2 as pb
from holdfast.v1 import session_pb2_grpc
from router.access.keys import new_key
from tests.harness import running

PAIRS, LENGTH = 40, 400
TELLS = 1e-3
"""Of coins that are fair, fewer than this are as one-sided: enough for somebody who asks."""
CHANCE = 1e-6
"""As one-sided by chance: never in the life of this test."""


def one_sided(num_faster: int, num_pairs: int) -> float:
    """How likely a fair coin is to be as one-sided (sign test, both sides)."""
    far = max(num_faster, num_pairs - num_faster)
    return min(1.0, 2 * sum(comb(num_pairs, k) for k in range(far, num_pairs + 1)) / 2**num_pairs)


async def test_time_does_not_tell_what_another_tenant_has_cached(tmp_path: Path) -> None:
    keys = {name: new_key(name) for name in ("mine", "yours")}
    rng = random.Random(7)

    def prompt() -> list[int]:
        return [rng.randrange(10, 2000) for _ in range(LENGTH)]

    stored = tuple(stored for _, stored in keys.values())
    async with running(tmp_path, num_workers=1, api_keys=stored) as cluster, cluster.channel() as channel:
        stub = session_pb2_grpc.SessionServiceStub(channel)

        async def seconds(name: str, tokens: list[int]) -> float:
            began = time.perf_counter()
            request = pb.GenerateRequest(tokens=pb.TokenIds(ids=tokens), sampling=pb.Sampling(max_tokens=1))
            async for _ in stub.Generate(request, metadata=[("authorization", f"Bearer {keys[name][0]}")]):
                pass
            return time.perf_counter() - began

        async def num_faster(asks: str) -> int:
            """Pairs in which the prompt that ``mine`` has cached was faster than one that nobody has."""
            count = 0
            for _ in range(PAIRS):
                cached, new = prompt(), prompt()
                await seconds("mine", cached)
                both = [cached, new]
                rng.shuffle(both)
                took = {tuple(tokens): await seconds(asks, tokens) for tokens in both}
                count += took[tuple(cached)] < took[tuple(new)]
            return count

        mine, yours = await num_faster("mine"), await num_faster("yours")
        assert mine > PAIRS / 2 and one_sided(mine, PAIRS) < TELLS, f"this test would see it: {mine} of {PAIRS}"
        assert one_sided(yours, PAIRS) > CHANCE, f"another's cached prefix was faster in {yours} of {PAIRS}"
        await cluster.assert_no_leak()
