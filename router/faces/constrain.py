"""From a request's tools and format to the output's grammar, and the parser of what comes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from holdfast.errors import InvalidRequest
from holdfast.v1 import session_pb2
from router.core import RouterCore
from router.faces.tools import ToolUse
from router.formats.deltas import Parser


def constrain(
    core: RouterCore, use: ToolUse, prompt: str, sampling: session_pb2.Sampling, *, reasoning: bool
) -> Callable[[], Parser] | None:
    """Constrain the output as the tools need it. Returns what makes the parser of a choice; None: all of it is text.

    ``prompt``: the rendered conversation. ``reasoning``: it is wanted apart from the text.
    Raises InvalidRequest if the request has a grammar of its own and requires a call.
    """
    style, has_tools = core.style, bool(use.functions)
    if has_tools and use.required and sampling.HasField("grammar"):
        raise InvalidRequest(f"set only one of tool_choice and {sampling.grammar.param}", "tool_choice")
    grammar = sampling.grammar if sampling.HasField("grammar") else None
    calls = None
    if has_tools:
        calls = style.calls_grammar(use.functions, prompt, required=use.required, parallel=use.parallel)
    grammar = style.after_reasoning(grammar, prompt) if grammar is not None else calls
    if grammar is not None:
        sampling.grammar.CopyFrom(grammar)
    if not style.reads(calls=has_tools, reasoning=reasoning):
        return None
    sampling.show_special_tokens = True
    return partial(style.parser, prompt, calls=has_tools, reasoning=reasoning, functions=use.functions)
