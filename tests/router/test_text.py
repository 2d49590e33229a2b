"""Text and tokens: sessions go on from their own tokens, stop strings are never shown."""

from __future__ import annotations

import json
from array import array
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import InvalidRequest
from router.text import TextCodec
from tests.harness import model_copy
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
)
def test_nothing_of_a_stop_string_is_shown(text: str, stops: list[str]) -> None:
    ends = [(text.find(stop) + len(stop), stop) for stop in stops if stop in text]
    stream, shown = CODEC.stream(stops), ""
    for token in CODEC.encode(text):
        shown += stream.push([token])
        assert not any(stop in shown for stop in stops), "a stop string was shown"
    matched = min(ends)[1] if ends else None
    shown += stream.finish(matched)
    assert shown == stream.text
    assert text.startswith(shown)
    if matched is None:
        assert shown == text


def test_messages_that_the_template_refuses_are_the_clients_fault(tmp_path: Path) -> None:
    model = model_copy(tmp_path / "model")
    path = model / "tokenizer_config.json"
    refusing = {"chat_template": "{{ raise_exception('roles must alternate') }}"}
    path.write_text(json.dumps(json.loads(path.read_text()) | refusing))
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        TextCodec(model).render_chat([{"role": "user", "content": "x"}])


def test_model_without_a_template_serves_completions_only(tmp_path: Path) -> None:
    model = model_copy(tmp_path / "model")
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "chat_template"}))
    with pytest.raises(InvalidRequest, match="no chat template"):
        TextCodec(model).render_chat([{"role": "user", "content": "x"}])
