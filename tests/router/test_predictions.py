"""Drafts through the APIs: the same answers, faster, and what became of the drafts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from holdfast.tokens import pack_tokens
from holdfast.v1 import session_pb2 as pb
from holdfast.v1 import session_pb2_grpc
from tests.harness import ENGINE, Harness, running
from tests.workers.engine import eager
from workers.config import BUNDLED_MODEL
from workers.kv.slot import new_tokens

MESSAGES: Any = [{"role": "user", "content": "Return the list of names."}]


def make_eager(cluster: Harness) -> None:
    for server in cluster.workers.values():
        eager(server._leader)


@pytest.fixture
async def drafting(tmp_path: Path) -> AsyncIterator[Harness]:
    async with running(tmp_path, engine=replace(ENGINE, speculative_algorithm="NGRAM")) as harness:
        make_eager(harness)
        yield harness
        await harness.assert_no_leak()


@pytest.fixture
async def client(drafting: Harness) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{drafting.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def ask(client: AsyncOpenAI, **more: Any) -> Any:
    return await client.chat.completions.create(
        model="", messages=MESSAGES, max_completion_tokens=60, seed=5, extra_body={"ignore_eos": True}, **more
    )


async def test_a_predicted_answer_is_the_same_answer(client: AsyncOpenAI) -> None:
    plain = await ask(client)
    text = plain.choices[0].message.content
    assert plain.usage.completion_tokens_details.accepted_prediction_tokens == 0
    contents: list[Any] = [
        text,
        [{"type": "text", "text": text[:40]}, {"type": "text", "text": text[40:]}],
        text[:30] + " something else altogether " + text[40:],
    ]
    for content in contents:
        predicted = await ask(client, prediction={"type": "content", "content": content})
        details = predicted.usage.completion_tokens_details
        assert predicted.choices[0].message.content == text
        assert predicted.usage.completion_tokens == 60
        assert details.accepted_prediction_tokens > 3 and details.rejected_prediction_tokens >= 0


async def test_a_streamed_answer_says_what_was_accepted(client: AsyncOpenAI) -> None:
    text = (await ask(client)).choices[0].message.content
    usage, pieces = None, []
    options: Any = {"stream_options": {"include_usage": True}, "prediction": {"type": "content", "content": text}}
    async for chunk in await ask(client, stream=True, **options):
        pieces += [choice.delta.content or "" for choice in chunk.choices]
        usage = chunk.usage or usage
    assert "".join(pieces) == text and usage.completion_tokens_details.accepted_prediction_tokens > 10


async def test_several_choices_take_the_same_prediction(client: AsyncOpenAI) -> None:
    answer = await ask(client, n=2, temperature=0.0, prediction={"type": "content", "content": "Return the list"})
    assert answer.choices[0].message.content == answer.choices[1].message.content


@pytest.mark.parametrize("prediction", [{"type": "text", "content": "x"}, {"content": [{"type": "image"}]}, "x", {}])
async def test_a_malformed_prediction_is_refused(client: AsyncOpenAI, prediction: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="prediction"):
        await ask(client, prediction=prediction)


async def test_a_prediction_that_no_output_can_be_is_refused(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="prediction"):
        await ask(client, prediction={"type": "content", "content": "word " * 150_000})


async def test_generate_reports_drafts_by_sglangs_names(tmp_path: Path) -> None:
    body = {"text": "def main(", "sampling_params": {"max_new_tokens": 60, "temperature": 0, "ignore_eos": True}}
    engine = replace(ENGINE, speculative_algorithm="NGRAM")
    async with (
        running(tmp_path, num_workers=1, engine=engine) as cluster,  # recent outputs are a worker's own
        httpx.AsyncClient(base_url=cluster.url, timeout=30) as http,
    ):
        make_eager(cluster)
        first = (await http.post("/generate", json=body)).json()
        again = (await http.post("/generate", json=body)).json()
    meta = again["meta_info"]
    assert first["text"] == again["text"], "the second is a copy of the tenant's recent output"
    assert meta["spec_verify_ct"] < 20 and meta["spec_accept_token_num"] > 30
    assert meta["spec_accept_rate"] == meta["spec_accept_token_num"] / meta["spec_draft_token_num"]
    assert meta["spec_accept_length"] > 3


async def test_a_failover_keeps_the_prediction_and_the_counts(drafting: Harness) -> None:
    """The next worker gets the prediction too, and looks it up where the output stands."""

    def request(session: str, prediction: bytes = b"") -> pb.GenerateRequest:
        sampling = pb.Sampling(temperature=0.7, seed=3, max_tokens=90, ignore_eos=True, prediction=prediction)
        return pb.GenerateRequest(session_id=session, text="Return the list of", sampling=sampling)

    async with drafting.channel() as channel:
        stub = session_pb2_grpc.SessionServiceStub(channel)
        calm = [token async for answer in stub.Generate(request("calm")) for token in answer.tokens]
        tokens, last, lost_at = [], None, None
        async for answer in stub.Generate(request("storm", pack_tokens(new_tokens(calm)))):
            assert answer.index == len(tokens)
            tokens += answer.tokens
            if len(tokens) >= 20 and lost_at is None:
                lost_at = answer.speculation.prediction_accepted
                await drafting.lose_worker(drafting.pinned_to("storm"))
            last = answer
    assert tokens == calm and last is not None and lost_at is not None
    assert last.speculation.prediction_accepted >= lost_at > 0
    assert last.speculation.verify_steps < 40


async def test_a_prediction_of_unknown_tokens_is_refused(drafting: Harness) -> None:
    sampling = pb.Sampling(max_tokens=4, prediction=pack_tokens(new_tokens([10**6])))
    async with drafting.channel() as channel:
        stub = session_pb2_grpc.SessionServiceStub(channel)
        with pytest.raises(Exception, match="prediction"):
            async for _ in stub.Generate(pb.GenerateRequest(text="a", sampling=sampling)):
                pass


async def test_a_migrated_session_brings_its_draft_models_kv(tmp_path: Path) -> None:
    """The draft model is the model itself: it is always right, where the KV of its drafts is."""
    engine = replace(
        ENGINE,
        speculative_algorithm="STANDALONE",
        speculative_draft_model_path=BUNDLED_MODEL,
        speculative_num_draft_tokens=4,
    )
    sampling = pb.Sampling(temperature=0.7, seed=3, max_tokens=40, ignore_eos=True)

    async def turn(stub: session_pb2_grpc.SessionServiceStub, session: str) -> tuple[list[int], Any]:
        tokens, last = [], None
        async for answer in stub.Generate(pb.GenerateRequest(session_id=session, text="Return", sampling=sampling)):
            tokens += answer.tokens
            last = answer
        return tokens, last

    async with running(tmp_path, num_workers=1, engine=engine) as cluster, cluster.channel() as channel:
        make_eager(cluster)
        stub = session_pb2_grpc.SessionServiceStub(channel)
        expected = [(await turn(stub, "stays"))[0] for _ in range(2)]
        assert (await turn(stub, "moves"))[0] == expected[0]
        await cluster.start_worker("w1", 1, engine)
        make_eager(cluster)
        drained = await cluster.router.core.migrator.drain("w0", 5.0)
        assert drained["sessions_migrated"] == 2, drained
        tokens, last = await turn(stub, "moves")
        assert tokens == expected[1] and last.cached_tokens >= 32
        assert last.speculation.accepted == last.speculation.proposed > 20
        await cluster.assert_no_leak()
