"""Text and tokens: sessions keep their own tokens, and stop strings are never shown."""

from __future__ import annotations

import asyncio
import json
import threading
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from holdfast.detokenizer import Detokenizer
from holdfast.errors import InvalidRequest
from holdfast.v1 import session_pb2
from router import inputs
from router.text import TextCodec
from router.time_limit import THREAD
from tests.harness import ENGINE, model_copy, running
from tests.waiting import until
from workers.config import BUNDLED_MODEL

CODEC = TextCodec(BUNDLED_MODEL)


def test_text_that_the_model_wrote_keeps_its_tokens() -> None:
    # Spelled letter by letter, as no tokenizer would: the session's tokens stay all the same.
    prompt = CODEC.encode("<|user|>hello<|end|><|assistant|>")
    reply = [token for letter in "reply" for token in CODEC.encode(letter)]
    known = array("i", [*prompt, *reply, *CODEC.encode("<|end|>")])
    assert len(CODEC.encode("reply")) < len(reply)
    text = "<|user|>hello<|end|><|assistant|>reply<|end|><|user|>more<|end|><|assistant|>"
    keep, added = CODEC.continue_session(known, CODEC.decode(known), text, special=False)
    assert keep == len(known)
    assert CODEC.decode(added) == "<|user|>more<|end|><|assistant|>"


def test_edited_text_keeps_the_common_prefix() -> None:
    known = array("i", CODEC.encode("<|user|>hello there<|end|><|assistant|>hi<|end|>"))
    text = "<|user|>hello you<|end|><|assistant|>"
    keep, added = CODEC.continue_session(known, CODEC.decode(known), text, special=False)
    assert 0 < keep < len(known)
    assert CODEC.decode([*known[:keep], *added]) == text


@settings(max_examples=100, deadline=None)
@given(old=st.text(max_size=30), new=st.text(max_size=30))
def test_continuing_always_ends_with_the_text(old: str, new: str) -> None:
    known = array("i", CODEC.encode(old))
    for text in (old + new, new):
        keep, added = CODEC.continue_session(known, CODEC.decode(known), text, special=False)
        assert CODEC.decode([*known[:keep], *added]) == CODEC.decode(CODEC.encode(text))


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(alphabet="ab<>é\n", max_size=40),
    stops=st.lists(st.text(alphabet="ab<>é", min_size=1, max_size=4), max_size=3),
    min_tokens=st.integers(0, 5),
)
def test_nothing_of_a_stop_string_is_shown(text: str, stops: list[str], min_tokens: int) -> None:
    tokens = CODEC.encode(text)
    detokenizer = Detokenizer(CODEC._backend)
    free = "".join(map(detokenizer.push, tokens[:min_tokens]))
    rest = text[len(free) :]
    stream, shown = CODEC.stream(session_pb2.Sampling(stop=stops, min_tokens=min_tokens)), ""
    for token in tokens:
        shown += stream.push([token])
        assert not any(stop in shown[len(free) :] for stop in stops), "a stop string was shown"
    assert (stream.stopped_by is None) == (not any(stop in rest for stop in stops))
    first = min((rest.find(stop) for stop in stops if stop in rest), default=len(rest))
    shown += stream.finish(stream.stopped_by)
    assert shown == stream.text == free + rest[:first]


def test_messages_that_the_template_refuses_are_the_clients_fault(tmp_path: Path) -> None:
    model = model_copy(tmp_path / "model")
    path = model / "tokenizer_config.json"
    refusing = {"chat_template": "{{ raise_exception('roles must alternate') }}"}
    path.write_text(json.dumps(json.loads(path.read_text()) | refusing))
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        TextCodec(model).render_chat([{"role": "user", "content": "x"}])


def renders() -> bool:
    """Whether a template is being rendered in a thread of its own."""
    return any(thread.name == THREAD for thread in threading.enumerate())


async def is_served_beside(http: httpx.AsyncClient, body: dict[str, Any], limit_s: float) -> bool:
    """Whether a conversation is served while a template runs without an end, which is stopped after ``limit_s``."""
    slow = {**body, "chat_template_kwargs": {"slow": True}}
    stuck = asyncio.create_task(http.post("/chat/completions", json=slow))
    await until(lambda: stuck.done() or renders(), 20, "it to begin")
    assert (await http.post("/chat/completions", json=body)).status_code == 200
    is_beside = not stuck.done()
    refused = await stuck
    assert refused.status_code == 400
    assert f"takes longer than {limit_s:g} s" in refused.json()["error"]["message"]
    await until(lambda: not renders(), 20, "its thread to end")
    return is_beside


async def test_a_template_that_does_not_end_is_stopped_and_others_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_copy(tmp_path / "model")
    path = model / "tokenizer_config.json"
    endless = "{% set r = range(99999 if slow else 0) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}x"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": endless}))
    body = {"model": "holdfast-tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    async with (
        running(tmp_path, num_workers=1, engine=replace(ENGINE, model=model)) as cluster,
        httpx.AsyncClient(base_url=f"{cluster.url}/v1", timeout=60) as http,
    ):
        for limit_s in (0.5, 4.0, 20.0):
            monkeypatch.setattr(inputs, "TEMPLATE_LIMIT_S", limit_s)
            if await is_served_beside(http, body, limit_s):
                break
        else:
            pytest.fail("nothing is served beside it, however long it may take")


def test_model_without_a_template_serves_completions_only(tmp_path: Path) -> None:
    model = model_copy(tmp_path / "model")
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "chat_template"}))
    with pytest.raises(InvalidRequest, match="no chat template"):
        TextCodec(model).render_chat([{"role": "user", "content": "x"}])


def byte_tokenizer() -> Tokenizer:
    """With a token for each byte, as Llama 2 has them, and some words."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁a": 256, "b": 257, "▁": 258, "é": 259}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


BYTES = byte_tokenizer()


@settings(max_examples=300, deadline=None)
@given(before=st.lists(st.integers(0, 259), max_size=30), text=st.text(alphabet="xé▁漢", max_size=12))
def test_bytes_that_are_no_text_do_not_end_the_stream(before: list[int], text: str) -> None:
    detokenizer = Detokenizer(BYTES)
    for token in before:
        detokenizer.push(token)
    detokenizer.push(257)  # every byte that was held back is decoded by now
    assert "".join(detokenizer.push(byte) for byte in text.encode()) + detokenizer.push(257) == text + "b"


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet="ab é漢\n", max_size=40))
def test_the_text_of_all_tokens_is_that_of_each(text: str) -> None:
    backend, tokens = CODEC._backend, CODEC.encode(text)
    detokenizer = Detokenizer(backend)
    assert "".join(map(detokenizer.push, tokens)) == CODEC.decode(tokens) == text
