"""The formats by name, and which of them a checkpoint writes. The names are those of SGLang and vLLM."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from router.formats.calls import NamedCall, TaggedCalls, WholeCalls, read_gemma, read_glm, read_pythonic
from router.formats.deltas import Parser
from router.formats.harmony import Harmony
from router.formats.json_calls import JsonCalls
from router.formats.typed_arguments import Notation, NotExpressible, Tag, text_arguments

Schemas = Mapping[str, dict[str, Any]]
"""The parameters of functions, by name."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a family writes calls."""

    parser: Callable[[], Parser]
    markers: tuple[str, ...] = ()
    """A chat template with one of these is of this family."""
    call: tuple[str, str] = ("", "")
    """What a call has before and after its arguments, where these are JSON; NAME stands for its name."""
    around: tuple[str, str] = ("", "")
    """Before the first call and after the last."""
    separator: str = ""
    notation: Notation | None = None
    """Of arguments that are not JSON."""
    typed_parser: Callable[[Schemas], Parser] | None = None
    """A parser that knows the functions, where a value's text does not say its type."""
    at_start: str = ""
    """A call is the whole answer, and begins with this."""
    trigger: str = ""
    """The text that begins a call amid text; "" where none does."""
    short_ids: bool = False
    """The template refuses ids of calls that have not nine letters or digits."""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a family writes reasoning."""

    begin: str
    end: str
    markers: tuple[str, ...]
    """A chat template with one of these is of this family."""
    begins_inside: bool = False
    """The model does not write ``begin``."""

    def is_closed(self, prompt: str) -> bool:
        """The rendered conversation has ended the answer's reasoning already: it is turned off."""
        return bool(self.end) and prompt.rstrip().endswith(self.end)

    def is_open(self, prompt: str) -> bool:
        """The answer begins inside the reasoning."""
        return not self.is_closed(prompt) and (self.begins_inside or prompt.rstrip().endswith(self.begin))


def _named(separator: str, name: Callable[[str], str]) -> Callable[[Callable[[], int]], NamedCall]:
    return lambda next_index: NamedCall(next_index, separator, name)


def _before(separator: str) -> Callable[[str], str]:
    return lambda head: head.split(separator)[0].strip()


def _after(separator: str, head: str) -> str:
    return head.split(separator, 1)[1].split("\n")[0].strip()


PYTHONIC = Notation(
    pair=lambda name: (f"{name}=", ""),
    separator=", ",
    text=('"', r'[^"\\\x00-\x1f]*', '"'),
    literals=("True", "False", "None"),
)
GLM = Notation(
    pair=lambda name: (f"<arg_key>{name}</arg_key>\n<arg_value>", "</arg_value>\n"),
    separator="",
    text=("", "[^<]+", ""),
    nested=True,
)
GEMMA = Notation(pair=lambda name: (f"{name}:", ""), separator=",", text=("<escape>", "[^<]*", "<escape>"))


def _glm_parser(functions: Schemas) -> Parser:
    texts = {name: text_arguments(schema) for name, schema in functions.items()}
    return TaggedCalls("<tool_call>", "</tool_call>", lambda i: WholeCalls(i, partial(read_glm, texts=texts)))


DEEPSEEK_BEGIN, DEEPSEEK_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
DEEPSEEK_AROUND = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
DEEPSEEK_SEP = "<｜tool▁sep｜>"
JSON_CALL = ('{"name": "NAME", "arguments": ', "}")

CALLS: dict[str, CallFormat] = {
    "glm45": CallFormat(
        lambda: _glm_parser({}),
        typed_parser=_glm_parser,
        markers=("<arg_key>",),
        call=("<tool_call>NAME\n", "</tool_call>"),
        separator="\n",
        notation=GLM,
        trigger="<tool_call>",
    ),
    "hermes": CallFormat(
        partial(TaggedCalls, "<tool_call>", "</tool_call>", JsonCalls),
        markers=("<tool_call>",),
        call=('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>"),
        separator="\n",
        trigger="<tool_call>",
    ),
    "deepseekv31": CallFormat(
        partial(
            TaggedCalls,
            DEEPSEEK_BEGIN,
            DEEPSEEK_END,
            _named(DEEPSEEK_SEP, _before(DEEPSEEK_SEP)),
            dropped=DEEPSEEK_AROUND,
        ),
        markers=(
            "'<｜tool▁call▁begin｜>'+ tool['function']['name']",
            "<｜tool▁call▁begin｜>'+tool['function']['name']",
        ),
        call=(f"{DEEPSEEK_BEGIN}NAME{DEEPSEEK_SEP}", DEEPSEEK_END),
        around=DEEPSEEK_AROUND,
        trigger=DEEPSEEK_AROUND[0],
    ),
    "deepseekv3": CallFormat(
        partial(
            TaggedCalls,
            DEEPSEEK_BEGIN,
            DEEPSEEK_END,
            _named(DEEPSEEK_SEP, partial(_after, DEEPSEEK_SEP)),
            dropped=DEEPSEEK_AROUND,
        ),
        markers=(DEEPSEEK_BEGIN,),
        call=(f"{DEEPSEEK_BEGIN}function{DEEPSEEK_SEP}NAME\n```json\n", f"\n```{DEEPSEEK_END}"),
        around=DEEPSEEK_AROUND,
        separator="\n",
        trigger=DEEPSEEK_AROUND[0],
    ),
    "mistral_v11": CallFormat(
        partial(TaggedCalls, "[TOOL_CALLS]", "", _named("[ARGS]", _before("[ARGS]"))),
        markers=("[ARGS]",),
        call=("[TOOL_CALLS]NAME[ARGS]", ""),
        trigger="[TOOL_CALLS]",
        short_ids=True,
    ),
    "mistral": CallFormat(
        partial(TaggedCalls, "[TOOL_CALLS]", "", JsonCalls),
        markers=("[TOOL_CALLS]",),
        call=JSON_CALL,
        around=("[TOOL_CALLS] [", "]"),
        separator=", ",
        trigger="[TOOL_CALLS]",
        short_ids=True,
    ),
    "gpt-oss": CallFormat(
        Harmony,
        markers=("<|channel|>",),
        call=("<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>", "<|call|>"),
        trigger="<|channel|>commentary to=functions.",
    ),
    "gemma": CallFormat(
        partial(TaggedCalls, "<start_function_call>", "<end_function_call>", lambda i: WholeCalls(i, read_gemma)),
        markers=("<start_function_call>",),
        call=("<start_function_call>call:NAME{", "}<end_function_call>"),
        notation=GEMMA,
        trigger="<start_function_call>",
    ),
    "llama3": CallFormat(
        partial(TaggedCalls, "<|python_tag|>", "", JsonCalls, at_start="{"),
        markers=("<|python_tag|>", '"parameters": dictionary of argument name'),
        call=('{"name": "NAME", "parameters": ', "}"),
        separator="; ",
        at_start="{",
    ),
    "pythonic": CallFormat(
        partial(TaggedCalls, "", "", lambda i: WholeCalls(i, read_pythonic), at_start="["),
        markers=("[func_name1(params_name1=params_value1",),
        call=("NAME(", ")"),
        around=("[", "]"),
        separator=", ",
        at_start="[",
        notation=PYTHONIC,
    ),
}
"""In the order of detection: the marker of one may be in the template of another."""

ALIASES = {
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3": "hermes",
    "llama4": "pythonic",
    "deepseek_v3": "deepseekv3",
} | {
    "gpt_oss": "gpt-oss",
    "harmony": "gpt-oss",
    "openai": "gpt-oss",
    "glm": "glm45",
    "glm4_moe": "glm45",
    "llama3_json": "llama3",
    "functiongemma": "gemma",
    "deepseek_v31": "deepseekv31",
}

REASONING: dict[str, ReasoningFormat] = {
    "mistral": ReasoningFormat("[THINK]", "[/THINK]", ("[THINK]",)),
    "gpt-oss": ReasoningFormat("", "", ("<|channel|>",)),
    "deepseek-r1": ReasoningFormat("<think>", "</think>", (), begins_inside=True),
    "qwen3": ReasoningFormat("<think>", "</think>", ("<think>", "</think>")),
}
REASONING_ALIASES = {
    "qwen3-thinking": "deepseek-r1",
    "deepseek_r1": "deepseek-r1",
    "deepseek-v3": "qwen3",
    "glm45": "qwen3",
} | {
    "gpt_oss": "gpt-oss",
    "harmony": "gpt-oss",
}


def detect_calls(template: str) -> str:
    """The call format of a checkpoint with this chat template; "" if it has none that is known."""
    return next((name for name, form in CALLS.items() if any(marker in template for marker in form.markers)), "")


def detect_reasoning(template: str) -> str:
    """The reasoning format of a checkpoint with this chat template; "" if it has none that is known."""
    return next((name for name, form in REASONING.items() if any(m in template for m in form.markers)), "")


def call_tag(form: CallFormat, name: str, schema: dict[str, Any], *, strict: bool) -> Tag:
    """The structural tag of a call of one function. Raises NotExpressible for a ``strict`` one."""
    begin, end = (part.replace("NAME", json.dumps(name)[1:-1]) for part in form.call)
    content: Tag = {"type": "json_schema", "json_schema": schema}
    if form.notation is not None:
        try:
            content = form.notation.arguments(schema)
        except NotExpressible:
            if strict:
                raise
            content = form.notation.any_arguments(schema)
    return {"type": "tag", "begin": begin, "content": content, "end": end}
