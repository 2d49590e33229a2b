"""How this checkpoint answers: its reasoning and calls, read from its outputs and enforced by grammars."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.errors import ConfigError, UnsupportedParameter
from holdfast.v1 import session_pb2
from router.formats.deltas import Parser, PlainText
from router.formats.families import (
    ALIASES,
    CALLS,
    REASONING,
    REASONING_ALIASES,
    CallFormat,
    ReasoningFormat,
    call_tag,
    detect_calls,
    detect_reasoning,
)
from router.formats.harmony import Harmony
from router.formats.reasoning import TaggedReasoning
from router.formats.typed_arguments import NotExpressible, Tag

ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Function:
    """A function that the model may call."""

    name: str
    parameters: dict[str, Any] | None
    strict: bool


class AnswerStyle:
    """The formats of one checkpoint. ``calls``, ``reasoning``: their names; None: as its chat template shows.

    Raises ConfigError for a name that is unknown.
    """

    def __init__(self, calls: str | None, reasoning: str | None, chat_template: str) -> None:
        self.call_name = _known("tool_call_parser", calls, CALLS, ALIASES, detect_calls(chat_template))
        self.reasoning_name = _known(
            "reasoning_parser", reasoning, REASONING, REASONING_ALIASES, detect_reasoning(chat_template)
        )
        # A template that shows no format leaves the choice to us; "none" is a choice.
        self.calls: CallFormat | None = CALLS.get(self.call_name or "hermes")
        self._reasoning: ReasoningFormat | None = REASONING.get(self.reasoning_name)
        self._is_harmony = "gpt-oss" in (self.call_name, self.reasoning_name)

    def reads(self, *, calls: bool, reasoning: bool) -> bool:
        """Whether an answer has anything but plain text to find."""
        return self._is_harmony or (calls and self.calls is not None) or (reasoning and self._reasoning is not None)

    def parser(self, prompt: str, *, calls: bool, reasoning: bool, functions: Sequence[Function] = ()) -> Parser:
        """The parser of one output. ``prompt``: the rendered conversation, which may open the reasoning."""
        if self._is_harmony:
            return Harmony()
        answer: Parser = PlainText()
        if calls and self.calls is not None:
            typed = self.calls.typed_parser
            schemas = {function.name: function.parameters or {} for function in functions}
            answer = typed(schemas) if typed is not None else self.calls.parser()
        form = self._reasoning
        if not reasoning or form is None:
            return answer
        return TaggedReasoning(form.begin, form.end, answer, inside=form.is_open(prompt))

    def calls_grammar(
        self, functions: Sequence[Function], prompt: str, *, required: bool, parallel: bool
    ) -> session_pb2.Grammar | None:
        """What makes calls valid: of ``required`` ones, or of strict ones amid text. Raises UnsupportedParameter."""
        form = self.calls
        if form is None:
            raise UnsupportedParameter(
                "tools: this model writes no calls; another --tool-call-parser than none lets it", "tools"
            )
        if not required and not any(function.strict for function in functions):
            return None
        tags = [self._call_tag(form, function, required=required) for function in functions]
        listed: Tag = {"type": "tags_with_separator", "tags": tags, "separator": form.separator}
        listed |= {"at_least_one": True, "stop_after_first": not parallel}
        amid: Tag = {"type": "triggered_tags", "triggers": [form.trigger]}
        if required:
            body = _around(form, listed)
        elif form.at_start:  # an answer is text or calls
            text = {"type": "regex", "pattern": rf"(\s*[^\s\{form.at_start}](.|\n)*)?"}
            body = {"type": "or", "elements": [_around(form, listed), text]}
        elif form.around[0]:  # the calls are a list, of which an answer has one
            begin, end = form.around
            whole = {"type": "tag", "begin": begin, "content": listed, "end": end}
            body = amid | {"tags": [whole], "stop_after_first": True}
        else:
            body = amid | {"tags": tags, "stop_after_first": not parallel}
        return self._after_reasoning(body, prompt, "tools", required=required)

    def _call_tag(self, form: CallFormat, function: Function, *, required: bool) -> Tag:
        schema = (function.parameters if function.strict or required else None) or ANY_OBJECT
        try:
            return call_tag(form, function.name, schema, strict=function.strict)
        except NotExpressible as error:
            message = f"tools: strict: {function.name}: the {self.call_name} format: {error}"
            raise UnsupportedParameter(message, "tools") from None

    def after_reasoning(self, grammar: session_pb2.Grammar | None, prompt: str) -> session_pb2.Grammar | None:
        """The grammar of an answer, for an output that may begin with reasoning."""
        if grammar is None or (self._reasoning is None and not self._is_harmony):
            return grammar
        if grammar.WhichOneof("kind") == "json_schema":
            body: Tag = {"type": "json_schema", "json_schema": json.loads(grammar.json_schema)}
        elif grammar.WhichOneof("kind") == "regex":
            body = {"type": "regex", "pattern": grammar.regex}
        else:
            return grammar
        if self._is_harmony:
            body = {"type": "tag", "begin": "<|channel|>final<|message|>", "content": body, "end": ""}
        return self._after_reasoning(body, prompt, grammar.param, required=True)

    def _after_reasoning(self, body: Tag, prompt: str, param: str, *, required: bool) -> session_pb2.Grammar:
        form = self._reasoning
        if self._is_harmony and required:
            end = "<|end|><|start|>assistant"
            thought: Tag = _text_tag("<|channel|>analysis<|message|>", end)
            body = {"type": "sequence", "elements": [{"type": "optional", "content": thought}, body]}
        elif form is not None and form.begin and required and not form.is_closed(prompt):
            inside = form.is_open(prompt)
            thought = _text_tag("" if inside else form.begin, form.end)
            space: Tag = {"type": "regex", "pattern": r"\n{0,2}"}
            thought = {"type": "sequence", "elements": [thought, space]}
            first = thought if inside else {"type": "optional", "content": thought}
            body = {"type": "sequence", "elements": [first, body]}
        text = json.dumps({"type": "structural_tag", "format": body}, ensure_ascii=False)
        return session_pb2.Grammar(structural_tag=text, param=param)


def _text_tag(begin: str, end: str) -> Tag:
    return {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": end}


def _around(form: CallFormat, body: Tag) -> Tag:
    parts = [{"type": "const_string", "value": text} for text in form.around]
    return {"type": "sequence", "elements": [parts[0], body, parts[1]]} if form.around[0] else body


def _known(setting: str, name: str | None, names: dict[str, Any], aliases: dict[str, str], detected: str) -> str:
    if name is None:
        return detected
    name = aliases.get(name, name)
    if name not in names and name not in ("", "none"):
        raise ConfigError(f"{setting}: {name!r} is unknown; known: {', '.join(sorted({*names, *aliases}))}")
    return name
