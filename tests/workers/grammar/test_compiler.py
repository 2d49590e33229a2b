"""What grammars allow and refuse, token by token, without a model."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from llguidance import LLMatcher

from benchmarks.schemas import corpus
from holdfast.errors import InvalidRequest
from tests.schemas import check
from workers.config import BUNDLED_MODEL
from workers.grammar.compiler import GrammarCompiler
from workers.scheduling import Grammar

VOCABULARY, EOS = 2048, (4, 0)
COMPILER = GrammarCompiler(BUNDLED_MODEL / "tokenizer.json", VOCABULARY, EOS)


def compiled(kind: str, text: Any) -> LLMatcher:
    return COMPILER.compile(Grammar(kind, text if isinstance(text, str) else json.dumps(text), "field")).deep_copy()


def accepts(matcher: LLMatcher, text: str) -> bool:
    tokens = COMPILER.tokenizer.tokenize_str(text, parse_special=True)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def random_text(matcher: LLMatcher, rng: random.Random, max_tokens: int = 600) -> str | None:
    """A text of random allowed tokens; None if it became too long."""
    tokens: list[int] = []
    while not matcher.is_stopped() and len(tokens) < max_tokens:
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = [token for token in range(VOCABULARY) if mask >> token & 1]
        tokens.append(rng.choice(allowed))
        assert matcher.consume_token(tokens[-1])
    if not matcher.is_stopped():
        return None
    return COMPILER.tokenizer.decode_str([token for token in tokens if token not in EOS])


def test_every_text_of_a_schema_is_valid() -> None:
    num_texts = 0
    for seed, schema in enumerate(corpus(200)):
        text = random_text(compiled("json_schema", schema), random.Random(seed))
        if text is not None:
            check(text, schema)
            num_texts += 1
    assert num_texts > 190


@pytest.mark.parametrize(
    ("kind", "grammar", "valid", "invalid"),
    [
        ("regex", r"\d{3}-[a-c]+", "123-abca", "12-a"),
        ("ebnf", 'root ::= "a" ("b" | "c")*', "abcb", "ad"),
        ("ebnf", 'start: "a" ("b" | "c")*', "abcb", "ad"),
        ("json_schema", {"type": "array", "items": {"type": "integer"}}, "[1, 2]", "[1, x]"),
        ("json_schema", {"type": "object", "properties": {"a": {"type": "null"}}}, '{\n  "a": null\n}', '{"a": 1}'),
    ],
)
def test_grammars(kind: str, grammar: Any, valid: str, invalid: str) -> None:
    assert accepts(compiled(kind, grammar), valid)
    assert not accepts(compiled(kind, grammar), invalid)


def test_whitespace_ends() -> None:
    matcher = compiled("json_schema", {"type": "array", "items": {"type": "integer"}})
    assert not accepts(matcher, "[" + " " * 200 + "1]")


CALL = {"begin": "<f=a>", "content": {"type": "json_schema", "json_schema": {"type": "boolean"}}, "end": "</f>"}
TEXT_END = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": "</think>"}


@pytest.mark.parametrize(
    ("form", "valid", "invalid"),
    [
        ({"type": "const_string", "value": "yes"}, ["yes"], ["no"]),
        ({"type": "const_string", "value": "a<|user|>b"}, ["a<|user|>b"], ["ab"]),
        ({"type": "tag", **CALL}, ["<f=a>true</f>"], ["<f=a>1</f>", "x<f=a>true</f>"]),
        (
            {"type": "triggered_tags", "triggers": ["<f="], "tags": [CALL]},
            ["just text", "so <f=a>true</f> and <f=a>false</f> then"],
            ["so <f=b>true</f>", "so <f=a>1</f>"],
        ),
        (
            {
                "type": "triggered_tags",
                "triggers": ["<f="],
                "tags": [CALL],
                "at_least_one": True,
                "stop_after_first": True,
            },
            ["so <f=a>true</f>"],
            ["just text", "<f=a>true</f> more"],
        ),
        (
            {"type": "tags_with_separator", "tags": [CALL], "separator": ", ", "at_least_one": True},
            ["<f=a>true</f>", "<f=a>true</f>, <f=a>false</f>"],
            ["", "<f=a>true</f><f=a>true</f>"],
        ),
        (
            {"type": "sequence", "elements": [TEXT_END, {"type": "regex", "pattern": "[0-9]/[0-9]"}]},
            ["I wonder </think>1/2"],
            ["1/2", "</think>1/2 "],
        ),
        (
            {
                "type": "or",
                "elements": [{"type": "const_string", "value": "a"}, {"type": "const_string", "value": "b"}],
            },
            ["a", "b"],
            ["ab"],
        ),
        (
            {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": "<|user|> then"},
            ["I wonder<|user|> then"],
            ["I wonder<|user|>", "I wonder then"],
        ),
        (
            {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": "so<|user|>!"},
            ["I wonder so<|user|>!"],
            ["I wonder so", "I wonder<|user|>!"],
        ),
        ({"type": "optional", "content": {"type": "const_string", "value": "a"}}, ["", "a"], ["b"]),
        ({"type": "any_text"}, ["", "whatever <f=a>"], ["no <|user|>"]),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) else "",
)
def test_structural_tags(form: dict[str, Any], valid: list[str], invalid: list[str]) -> None:
    tag = {"type": "structural_tag", "format": form}
    for text in valid:
        assert accepts(compiled("structural_tag", tag), text), text
    for text in invalid:
        assert not accepts(compiled("structural_tag", tag), text), text


def test_first_form_of_structural_tags() -> None:
    structures = [{"begin": "<f=a>", "schema": {"type": "boolean"}, "end": "</f>"}]
    tag = {"type": "structural_tag", "structures": structures, "triggers": ["<f="]}
    assert accepts(compiled("structural_tag", tag), "so <f=a>true</f> then")
    assert not accepts(compiled("structural_tag", tag), "so <f=a>7</f> then")


@pytest.mark.parametrize(
    ("kind", "grammar", "named"),
    [
        ("json_schema", {"type": "object", "properties": {"a": {"type": "strin"}}}, "strin.*#/properties/a of"),
        ("json_schema", {"properties": {"a/b": {"items": {"not": {}}}}}, '"not".*#/properties/a~1b/items of'),
        ("json_schema", {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/x"}]}, "#/anyOf/1 of|/\\$defs/x"),
        ("json_schema", {"$defs": {"x": {"type": 3}}, "$ref": "#/$defs/x"}, r"#/\$defs/x of"),
        ("json_schema", {"type": "object", "minProperties": "x"}, "minProperties.*# of"),
        ("json_schema", "[1]", "JSON object"),
        ("regex", "[a-", "unclosed character class|invalid regex"),
        ("ebnf", "root ::= foo", "foo"),
        ("ebnf", "((", "neither GBNF nor Lark|Expected|expected|found"),
        ("structural_tag", {"type": "structural_tag", "format": {"type": "zip"}}, "zip.*supported: any_text"),
        ("structural_tag", {"type": "structural_tag"}, "structures"),
        (
            "structural_tag",
            {
                "type": "structural_tag",
                "format": {
                    "type": "tag",
                    "begin": "<a>",
                    "content": {"type": "json_schema", "json_schema": {"properties": {"x": {"type": "strin"}}}},
                    "end": "</a>",
                },
            },
            "strin.*at #/properties/x of the schema /format/content/json_schema",
        ),
        ("structural_tag", {"format": {}}, "structural_tag"),
    ],
)
def test_refusals_name_the_part(kind: str, grammar: Any, named: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        compiled(kind, grammar)
    assert refused.value.param == "field"
    assert re.search(named, refused.value.message), refused.value.message
