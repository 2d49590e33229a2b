"""Conversion between text and tokens: chat templates, incremental decoding, stop strings."""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import AutoTokenizer

from holdfast.detokenizer import Detokenizer
from holdfast.errors import InvalidRequest, UnsupportedModel
from holdfast.v1 import session_pb2


class TextCodec:
    """The checkpoint's tokenizer and chat template."""

    def __init__(self, model: Path) -> None:
        if not (model / "tokenizer.json").exists():
            raise UnsupportedModel(f"tokenizer.json: not found in {model}; supported: fast tokenizers")
        self._tokenizer = AutoTokenizer.from_pretrained(str(model), local_files_only=True)
        self._backend = self._tokenizer.backend_tokenizer
        self.bos_id: int | None = self._tokenizer.bos_token_id
        self.vocab_size: int = self._backend.get_vocab_size()
        self.longest_token = max(map(len, self._backend.get_vocab()))
        """The longest token in characters."""
        template = self._tokenizer.chat_template
        self.chat_template: str = template if isinstance(template, str) else "".join((template or {}).values())
        """All of it, if the checkpoint has several; "" if it has none."""
        added = self._backend.get_added_tokens_decoder().items()
        self.special_tokens: dict[str, int] = {token.content: number for number, token in added if token.special}
        self._special_ids = frozenset(self.special_tokens.values())
        self._special = re.compile("|".join(map(re.escape, self.special_tokens)) or r"(?!)")

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of ``text``; with ``special``, including the tokens that start an input (BOS)."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=special).ids
        return ids

    def decode(self, tokens: Sequence[int], *, special: bool = True) -> str:
        """The text of ``tokens``; with ``special``, including special tokens."""
        text: str = self._backend.decode(list(tokens), skip_special_tokens=not special)
        return text

    def without_special(self, text: str) -> str:
        """``text`` without the texts of special tokens."""
        return self._special.sub("", text)

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        variables: dict[str, Any] | None = None,
        *,
        continues: bool = False,
        answers: bool = True,
    ) -> str:
        """The conversation in the model's chat template, up to the assistant's answer.

        ``continues``: the last message is the beginning of that answer. Without ``answers``, what precedes an answer
        is left out. ``variables``: of the template.
        Raises InvalidRequest.
        """
        if not self.chat_template:
            raise InvalidRequest("this model has no chat template; use /v1/completions")
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages,
                tools=tools,
                tokenize=False,
                add_generation_prompt=answers and not continues,
                continue_final_message=continues,
                **(variables or {}),
            )
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            raise InvalidRequest(f"messages: the model's chat template rejects them: {error}", "messages") from None
        return text

    def resolve_stops(self, sampling: session_pb2.Sampling) -> None:
        """Make stop strings that are special tokens, which no text shows, stop tokens."""
        special = [stop for stop in sampling.stop if stop in self.special_tokens]
        if special:
            sampling.stop_token_ids.extend(self.special_tokens[stop] for stop in special)
            texts = [stop for stop in sampling.stop if stop not in self.special_tokens]
            del sampling.stop[:]
            sampling.stop.extend(texts)

    def stop_token(self, output: Sequence[int], sampling: session_pb2.Sampling) -> int | None:
        """The token that ended an output which ended with ``stop``; None if a stop string did."""
        last = output[-1] if output else None
        return last if last in sampling.stop_token_ids or last in self._special_ids else None

    def stream(self, sampling: session_pb2.Sampling) -> OutputText:
        """A new turn's output text."""
        return OutputText(self._backend, sampling)

    def continue_session(
        self, known: array[int], known_text: str, text: str, *, special: bool
    ) -> tuple[int, list[int]]:
        """How to make a session with tokens ``known`` hold ``text``: (number of tokens to keep, tokens to add).

        Text that a model generated need not tokenize to the tokens it was generated as. If ``text`` begins
        with the session's text, all of the session's tokens are kept and only the rest is tokenized.
        Otherwise the whole text is tokenized, and the common prefix of tokens is kept.
        """
        if known and text.startswith(known_text) and len(text) > len(known_text):
            rest = text[len(known_text) :]
            added = self.encode(rest, special=False)
            if self.decode(added) == rest:
                return len(known), added
        ids = self.encode(text, special=special)
        keep_len = 0
        while keep_len < min(len(known), len(ids)) and known[keep_len] == ids[keep_len]:
            keep_len += 1
        return keep_len, ids[keep_len:]


class OutputText:
    """A turn's output as text, token by token. Holds back text that may be the start of a stop string.

    Stop strings are not matched in the first ``min_tokens``, as on the worker.
    """

    def __init__(self, backend: Any, sampling: session_pb2.Sampling) -> None:
        self._detokenizer = Detokenizer(backend, special=sampling.show_special_tokens)
        self._stops = tuple(sampling.stop)
        self._num_free = sampling.min_tokens
        self._includes_stop = sampling.include_stop
        self._held = ""
        self.text = ""

    def push(self, tokens: Sequence[int], ended_by: int | str | None = None) -> str:
        """The text that can be shown after these tokens. ``ended_by``: the stop token, if the last of them is one."""
        shown = ""
        if isinstance(ended_by, int) and not self._includes_stop:
            tokens = tokens[:-1]
        for token in tokens:
            self._held += self._detokenizer.push(token)
            if self._num_free:
                self._num_free -= 1
                shown += self._show(self._held)
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        return shown + self._show(self._held[: len(self._held) - keep])

    @property
    def stopped_by(self) -> str | None:
        """The first stop string in the text, if there is one."""
        found = [(self._held.find(stop), stop) for stop in self._stops if stop in self._held]
        return min(found)[1] if found else None

    def finish(self, matched: str | None) -> str:
        """The rest of the text, up to the stop string that ended the turn, if one did."""
        end = self._held.find(matched) if matched else -1
        if end >= 0 and matched and self._includes_stop:
            end += len(matched)
        shown = self._show(self._held if end < 0 else self._held[:end])
        self._held = ""
        return shown

    def _show(self, text: str) -> str:
        self._held = self._held[len(text) :]
        self.text += text
        return text


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of ``text`` to hold back: from a match on, or the start of one."""
    whole = text.find(stop)
    if whole >= 0:
        return len(text) - whole
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
