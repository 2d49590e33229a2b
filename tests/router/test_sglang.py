"""SGLang's native API, as its clients use it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from router.turns import sessions
from tests.harness import Harness
from tests.waiting import until


@pytest.fixture
async def http(cluster: Harness) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
        yield client


async def open_session(http: httpx.AsyncClient) -> str:
    answer = await http.post("/open_session", json={"capacity_of_str_len": 1000, "streaming": True})
    assert answer.status_code == 200
    session_id = answer.json()
    assert isinstance(session_id, str)
    return session_id


def body(session: str | None = None, max_new_tokens: int = 8, **more: Any) -> dict[str, Any]:
    params = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
    request: dict[str, Any] = {"sampling_params": params}
    if session:
        request["session_params"] = {"id": session, "rid": None}
    return request | more


async def generate(http: httpx.AsyncClient, request: dict[str, Any]) -> dict[str, Any]:
    answer = await http.post("/generate", json=request)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_streaming_session_appends_and_reuses_everything(http: httpx.AsyncClient) -> None:
    session, before = await open_session(http), 0
    for turn, text in enumerate(["Return the list", " and then", " sort it", " by key"]):
        meta = (await generate(http, body(session, text=text)))["meta_info"]
        assert meta["cached_tokens"] in ({0} if turn == 0 else {before, before - 1})
        before = meta["prompt_tokens"] + meta["completion_tokens"]
        assert meta["finish_reason"] == {"type": "length", "length": 8}
        assert meta["e2e_latency"] > 0
    assert (await http.post("/close_session", json={"session_id": session})).status_code == 200


async def test_session_equals_one_prompt_of_all_its_tokens(http: httpx.AsyncClient) -> None:
    session, tokens = await open_session(http), []
    for chunk in ([100, 101, 102], [200, 201], [300]):
        answer = await generate(http, body(session, input_ids=chunk))
        alone = await generate(http, body(input_ids=tokens + chunk))
        assert answer["output_ids"] == alone["output_ids"]
        tokens += chunk + answer["output_ids"]


@pytest.mark.parametrize("option", [{"offset": 3}, {"replace": True}, {"drop_previous_output": True}])
async def test_refused_options_leave_the_slot_intact(http: httpx.AsyncClient, option: dict[str, Any]) -> None:
    session = await open_session(http)
    first = (await generate(http, body(session, text="Return the list")))["meta_info"]
    refused = body(session, text=" more")
    refused["session_params"] |= option
    answer = await http.post("/generate", json=refused)
    assert answer.status_code == 400
    assert next(iter(option)) in answer.json()["error"]["message"]
    again = (await generate(http, body(session, text=" more")))["meta_info"]
    assert again["cached_tokens"] >= first["prompt_tokens"] + first["completion_tokens"] - 1


async def test_overlong_prompt_is_refused_and_leaves_the_slot_intact(http: httpx.AsyncClient) -> None:
    session = await open_session(http)
    first = (await generate(http, body(session, text="Return the list")))["meta_info"]
    answer = await http.post("/generate", json=body(session, input_ids=[7] * 5000))
    assert answer.status_code == 400
    assert "maximum allowed length" in answer.json()["error"]["message"]
    again = (await generate(http, body(session, text=" more")))["meta_info"]
    assert again["cached_tokens"] >= first["prompt_tokens"] + first["completion_tokens"] - 1


async def test_second_turn_while_one_runs_is_refused(
    http: httpx.AsyncClient, cluster: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "ENDING_S", 0.0)
    session = await open_session(http)
    first = asyncio.create_task(generate(http, body(session, 400, text="Return", rid="first")))
    await until(lambda: any(w._leader.scheduler.running for w in cluster.workers.values()), 10, "the turn to run")
    answer = await http.post("/generate", json=body(session, text="and"))
    assert answer.status_code == 400
    assert "already has an active request" in answer.json()["error"]["message"]
    await http.post("/abort_request", json={"rid": "first"})
    assert (await first)["meta_info"]["finish_reason"]["type"] == "abort"


async def test_a_turn_is_admitted_as_soon_as_the_client_of_the_one_before_has_left(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "ENDING_S", 10.0)  # a busy machine is slow to see that a client has left
    session = await open_session(http)
    good = (await generate(http, body(session, input_ids=[100, 101, 102, 103])))["meta_info"]
    for _ in range(20):
        left = body(session, 2000, input_ids=[200], stream=True)
        async with httpx.AsyncClient(base_url=http.base_url) as leaving, leaving.stream("POST", "/generate", json=left):
            pass
        again = (await generate(http, body(session, input_ids=[300])))["meta_info"]
        assert again["prompt_tokens"] == good["prompt_tokens"] + good["completion_tokens"] + 1
        good = again


async def test_abort_rolls_back_to_the_last_good_turn(http: httpx.AsyncClient, cluster: Harness) -> None:
    session = await open_session(http)
    good = await generate(http, body(session, input_ids=[100, 101, 102, 103]))
    total = good["meta_info"]["prompt_tokens"] + good["meta_info"]["completion_tokens"]
    doomed = asyncio.create_task(generate(http, body(session, 2000, text="Return", rid="doomed")))
    await until(lambda: any(w._leader.scheduler.running for w in cluster.workers.values()), 10, "the turn to run")
    await http.post("/abort_request", json={"abort_all": True})
    assert (await doomed)["meta_info"]["finish_reason"]["type"] == "abort"
    again = await generate(http, body(session, input_ids=[200]))
    assert again["meta_info"]["prompt_tokens"] == total + 1, "nothing of the aborted turn stays"
    assert again["meta_info"]["cached_tokens"] in (total, total - 1)
    alone = await generate(http, body(input_ids=[100, 101, 102, 103, *good["output_ids"], 200]))
    assert alone["output_ids"] == again["output_ids"]


async def test_an_id_names_one_request_at_a_time(http: httpx.AsyncClient, cluster: Harness) -> None:
    twice = {"text": ["a", "b"], "rid": ["same", "same"], "sampling_params": {"max_new_tokens": 2}}
    running = asyncio.create_task(generate(http, body(max_new_tokens=3000, text="a", rid="same")))
    await until(lambda: "same" in [turn_id for _, turn_id in cluster.router.core.live.ids()], 10, "the turn to run")
    for request in twice, body(text="b", rid="same"):
        refused = await http.post("/generate", json=request)
        assert refused.status_code == 400 and "Duplicate request ID same" in refused.json()["error"]["message"]
    await http.post("/abort_request", json={"rid": "same"})
    await running
    assert (await http.post("/generate", json=body(text="b", rid="same"))).status_code == 200


async def test_a_session_is_opened_once(http: httpx.AsyncClient) -> None:
    for streaming in True, False:
        opening = {"session_id": f"s-{streaming}", "streaming": streaming}
        assert (await http.post("/open_session", json=opening)).json() == f"s-{streaming}"
        again = await http.post("/open_session", json=opening)
        assert again.status_code == 409 and "is open already" in again.json()["error"]["message"]


async def test_unknown_and_closed_sessions_are_refused(http: httpx.AsyncClient) -> None:
    answer = await http.post("/generate", json=body("no-such", text="x"))
    assert answer.status_code == 400 and "no-such" in answer.json()["error"]["message"]
    session = await open_session(http)
    await generate(http, body(session, text="x"))
    for _ in range(2):
        assert (await http.post("/close_session", json={"session_id": session})).status_code == 200
    assert (await http.post("/generate", json=body(session, text="x"))).status_code == 400


async def test_stream_is_cumulative_and_equals_the_whole(http: httpx.AsyncClient) -> None:
    whole = await generate(http, body(text="Return the list", max_new_tokens=20))
    async with http.stream("POST", "/generate", json=body(text="Return the list", max_new_tokens=20, stream=True)) as r:
        lines = [line[6:] async for line in r.aiter_lines() if line]
    assert lines[-1] == "[DONE]"
    events = [json.loads(line) for line in lines[:-1]]
    assert events[-1]["text"] == whole["text"] and events[-1]["output_ids"] == whole["output_ids"]
    lengths = [len(event["output_ids"]) for event in events]
    assert lengths == sorted(lengths) and events[0]["meta_info"]["finish_reason"] is None


async def test_logprobs_of_input_and_output(http: httpx.AsyncClient) -> None:
    ids = [100, 101, 102, 103, 104]
    request = body(input_ids=ids, return_logprob=True, logprob_start_len=1, top_logprobs_num=3)
    meta = (await generate(http, request))["meta_info"]
    assert len(meta["output_token_logprobs"]) == 8
    assert [entry[1] for entry in meta["input_token_logprobs"]][1:] == ids[2:]
    assert all(len(top) == 3 for top in meta["output_top_logprobs"])
    # Scored again with everything cached but what is asked for: the same.
    again = (await generate(http, request))["meta_info"]
    for a, b in zip(meta["input_token_logprobs"][1:], again["input_token_logprobs"][1:], strict=True):
        assert a[0] == pytest.approx(b[0], abs=1e-4)


async def test_flush_health_and_model_info(http: httpx.AsyncClient, cluster: Harness) -> None:
    await generate(http, body(input_ids=list(range(100, 150))))
    assert (await http.post("/flush_cache")).status_code == 200
    assert all(w._leader.cache.groups[0].pool.num_cached == 0 for w in cluster.workers.values())
    assert (await http.get("/health")).status_code == 200
    assert (await http.get("/get_model_info")).json()["is_generation"] is True


async def test_text_and_input_ids_together_are_refused(http: httpx.AsyncClient) -> None:
    assert (await http.post("/generate", json=body(text="x", input_ids=[1]))).status_code == 400
    assert (await http.post("/generate", json=body())).status_code == 400
    assert (await http.post("/generate", json=body(input_ids=[999_999]))).status_code == 400
    assert (await http.post("/generate", json=body(input_ids=[]))).status_code == 400


class Tree:
    """A session that branches, and what each of its requests must see before it."""

    def __init__(self, http: httpx.AsyncClient, session: str) -> None:
        self.http, self.session = http, session
        self.context: dict[str | None, list[int]] = {None: []}
        self.prompt_len: dict[str, int] = {}

    async def ask(self, name: str, given: list[int], keep_len: int | None = None, **params: Any) -> dict[str, Any]:
        """``keep_len``: how much of the context of ``params["rid"]`` the request continues."""
        request = body(input_ids=given, rid=name) | {"session_params": {"id": self.session} | params}
        answer = await generate(self.http, request)
        before = self.context[params.get("rid")]
        sequence = before[: len(before) if keep_len is None else keep_len] + given
        alone = await generate(self.http, body(input_ids=sequence))
        assert answer["output_ids"] == alone["output_ids"], f"{name} does not go on from {params}"
        assert answer["meta_info"]["prompt_tokens"] == len(sequence)
        self.context[name], self.prompt_len[name] = sequence + answer["output_ids"], len(sequence)
        return answer["meta_info"]


async def test_a_branching_session_continues_any_request(cluster: Harness, http: httpx.AsyncClient) -> None:
    tree = Tree(http, (await http.post("/open_session", json={"session_id": "a/b"})).json())
    prompt = list(range(100, 140))
    await tree.ask("r1", prompt, offset=-1, replace=True)
    meta = await tree.ask("r2", [200, 201], rid="r1")
    assert meta["cached_tokens"] in (47, 48), "it costs its new tokens"
    await tree.ask("r3", [300], rid="r1")
    await tree.ask("r4", [400], rid="r2")
    await tree.ask("r5", [500], rid="r2", keep_len=42, offset=42)
    await tree.ask("r6", [600], rid="r2", keep_len=tree.prompt_len["r2"], drop_previous_output=True)
    await tree.ask("r6b", [601], rid="r2", keep_len=len(tree.context["r2"]) - 1, offset=-1)
    await tree.ask("r7", [700], rid="r4")
    await tree.ask("other root", [100, 101])
    await tree.ask("r8", [800], rid="r1", replace=True)
    for gone in ("r2", "r3", "r7", "never was"):
        refused = await http.post(
            "/generate", json=body(input_ids=[1]) | {"session_params": {"id": "a/b", "rid": gone}}
        )
        assert refused.status_code == 400 and "has no completed request" in refused.text
    await tree.ask("r9", [900], rid="r8")
    await tree.ask("r10", [901], rid="other root")
    past = body(input_ids=[1]) | {"session_params": {"id": "a/b", "rid": "r1", "offset": 49}}
    assert "must be from -48 to 48" in (await http.post("/generate", json=past)).text
    assert (await http.post("/close_session", json={"session_id": "a/b"})).status_code == 200
    journal = cluster.router.core.journal
    assert await journal.list_sessions("") == [] and await journal.list_objects("", "node/") == []


async def test_two_concurrent_requests_both_continue_one_request(http: httpx.AsyncClient) -> None:
    tree = Tree(http, (await http.post("/open_session", json={})).json())
    await tree.ask("root", [100, 101, 102])
    await asyncio.gather(*(tree.ask(f"child {i}", [200 + i], rid="root") for i in range(4)))
