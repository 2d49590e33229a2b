"""Hundreds of malformed requests: each gets a 4xx that names the parameter, and disturbs no neighbour."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from pydantic import BaseModel, ValidationError

from router.faces.anthropic.bodies import MessagesBody
from router.faces.openai.chat import ChatBody
from router.faces.openai.completions import CompletionBody
from router.faces.openai.response_body import ResponseBody
from router.faces.sglang.bodies import BatchBody
from tests.harness import Harness, running

pytestmark = pytest.mark.asyncio(loop_scope="module")
MODEL = "holdfast-tiny"
SAY = [{"role": "user", "content": "x"}]
VALID: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "/v1/chat/completions": (ChatBody, {"model": MODEL, "messages": SAY, "max_tokens": 2}),
    "/v1/completions": (CompletionBody, {"model": MODEL, "prompt": "x", "max_tokens": 2}),
    "/v1/responses": (ResponseBody, {"model": MODEL, "input": "x", "max_output_tokens": 2}),
    "/v1/messages": (MessagesBody, {"model": MODEL, "messages": SAY, "max_tokens": 2}),
    "/generate": (BatchBody, {"text": "x", "sampling_params": {"max_new_tokens": 2}}),
}
WRONG: tuple[Any, ...] = ({"a": {"b": []}}, [[["x"]]], -(10**12), 10**30, "no such value \u0001", 0.3, [{}], True)
NEIGHBOUR = {"model": MODEL, "prompt": "Return the", "max_tokens": 400, "seed": 1, "ignore_eos": True}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Harness]:
    async with running(tmp_path_factory.mktemp("malformed")) as cluster:
        yield cluster
        await cluster.assert_no_leak()


def variants() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Path, parameter and body: each field of each API with each value that is not one of its own."""
    for path, (model, valid) in VALID.items():
        for name, field in model.model_fields.items():
            name = field.alias or name
            for value in WRONG:
                body = valid | {name: value}
                try:
                    model.model_validate(body)
                except (ValidationError, ValueError):
                    yield path, name, body
                except Exception:  # an error of Holdfast's own, raised by a validator
                    yield path, name, body


async def test_each_is_refused_by_name_and_disturbs_nobody(cluster: Harness) -> None:
    known = list(variants())
    assert len(known) >= 300
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as http:
        alone = (await http.post("/v1/completions", json=NEIGHBOUR)).json()["choices"][0]["text"]
        headers = {"X-Session-ID": "neighbour"}
        neighbour = asyncio.create_task(http.post("/v1/completions", json=NEIGHBOUR, headers=headers))
        for path, name, body in known:
            answer = await http.post(path, json=body)
            assert answer.status_code == 400, (path, name, body, answer.text)
            error = answer.json()["error"]
            assert error["message"] and str(error["param"]).startswith(name), (path, body, error)
        assert (await neighbour).json()["choices"][0]["text"] == alone


@pytest.mark.parametrize("path", VALID)
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"3", b'"x"', b"\xff\xfe", b'{"messages": "\\ud800"}', b"null"])
async def test_what_is_no_object_is_refused(cluster: Harness, path: str, body: bytes) -> None:
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as http:
        answer = await http.post(path, content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400 and answer.json()["error"]["message"], answer.text
