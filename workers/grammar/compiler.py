"""From a request's grammar to a matcher, by llguidance (https://github.com/guidance-ai/llguidance).

Chosen over xgrammar: half its compile time over a corpus of schemas, half its time for a mask, and 8 MB installed
without dependencies, where xgrammar needs triton. It is loaded with the first grammar: an engine without it serves
all else.
"""

from __future__ import annotations

import importlib
import json
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from holdfast.errors import InvalidRequest
from workers.grammar.matcher import Matcher
from workers.grammar.schema_errors import failing_part
from workers.grammar.stop_patterns import PARAM, StopPatterns, lark_of_pattern
from workers.grammar.structural_tag import lark_of, schemas_of
from workers.scheduling import Grammar

WHITESPACE = r"\n?[\x20\t]{0,40}"
"""Between a JSON text's tokens: enough to indent it, and no more, because a model may not stop otherwise."""
JSON_OPTIONS = {"whitespace_pattern": WHITESPACE}


class GrammarCompiler:
    """Compiles grammars for one tokenizer, which is loaded with the first of them. For several threads."""

    def __init__(self, tokenizer_path: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._path = tokenizer_path
        self._vocab_size = vocab_size
        self._eos = list(eos_token_ids)

    @cached_property
    def _library(self) -> Any:
        """llguidance's matcher class."""
        try:
            return importlib.import_module("llguidance").LLMatcher
        except ImportError:
            raise InvalidRequest("this worker has no llguidance, which structured output needs") from None

    @cached_property
    def tokenizer(self) -> Any:
        """The vocabulary as llguidance reads it."""
        return importlib.import_module("llguidance").LLTokenizer(
            str(self._path), n_vocab=self._vocab_size, eos_token=self._eos or None
        )

    @cached_property
    def _special_tokens(self) -> dict[str, int]:
        added = Tokenizer.from_file(str(self._path)).get_added_tokens_decoder()
        return {token.content: number for number, token in added.items() if token.special}

    @cached_property
    def _bytes(self) -> Any:
        """A vocabulary whose tokens are the bytes."""
        return importlib.import_module("llguidance").LLTokenizer("byte")

    def compile_stops(self, patterns: tuple[str, ...]) -> StopPatterns:
        """A turn's stop patterns at their start; turns use copies. Raises InvalidRequest."""
        matchers: list[Matcher] = []
        for pattern in patterns:
            source = self._library.grammar_from_lark(lark_of_pattern(pattern))
            matcher: Matcher = self._library(self._bytes, source, log_level=0)
            if matcher.is_error():
                raise InvalidRequest(f"{PARAM}: {pattern!r}: {_brief(matcher.get_error())}", PARAM)
            matchers.append(matcher)
        return StopPatterns(patterns, matchers)

    def compile(self, grammar: Grammar) -> Matcher:
        """A matcher at its start; turns use copies of it. Raises InvalidRequest, which names the failing part."""
        try:
            source = self._source(grammar)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise InvalidRequest(f"{grammar.param}: {_brief(error)}", grammar.param) from None
        matcher: Matcher = self._library(self.tokenizer, source, log_level=0)
        if matcher.is_error():
            raise InvalidRequest(f"{grammar.param}: {self._explain(grammar, matcher.get_error())}", grammar.param)
        return matcher

    def mask_of(self, token: int) -> bytes:
        """What ``Matcher.compute_bitmask`` says where no other token may come next."""
        return (1 << token).to_bytes(self._vocab_size // 8 + 1, "little")

    def _source(self, grammar: Grammar) -> str:
        if grammar.kind == "json_schema":
            return self._json_source(json.loads(grammar.text))
        if grammar.kind == "regex":
            return str(self._library.grammar_from_regex(grammar.text))
        if grammar.kind == "ebnf":
            return str(self._library.grammar_from_lark(_lark_text(grammar.text)))
        lark = lark_of(json.loads(grammar.text), self._special_tokens, JSON_OPTIONS)
        return str(self._library.grammar_from_lark(lark))

    def _json_source(self, schema: Any) -> str:
        if not isinstance(schema, dict):
            raise ValueError("a schema must be a JSON object")
        return str(self._library.grammar_from_json_schema(schema | {"x-guidance": JSON_OPTIONS}))

    def _explain(self, grammar: Grammar, error: str) -> str:
        def fault_of(schema: dict[str, Any]) -> str:
            return str(self._library.validate_grammar(self._json_source(schema), self.tokenizer))

        if grammar.kind == "structural_tag":
            for place, schema in schemas_of(json.loads(grammar.text)):
                fault = fault_of(schema)
                if fault:
                    return f"{_brief(fault)} (at {failing_part(schema, fault_of) or '#'} of the schema {place})"
        if grammar.kind != "json_schema":
            return _brief(error)
        where = failing_part(json.loads(grammar.text), fault_of)
        return f"{_brief(error)} (at {where or '#'} of the schema)"


def _lark_text(text: str) -> str:
    """GBNF in Lark's syntax. Raises ValueError."""
    try:
        return str(importlib.import_module("llguidance.gbnf_to_lark").any_to_lark(text))
    except Exception as error:  # the converter's own class, and what it does not foresee
        raise ValueError(f"the grammar is neither GBNF nor Lark: {_brief(error)}") from None


def _brief(error: object) -> str:
    """The message's first line and, of one that quotes the grammar, the line that says what is wrong."""
    first, *others = (str(error).strip() or type(error).__name__).splitlines()
    return " ".join([first, *(line for line in others if line.startswith("error:"))])
