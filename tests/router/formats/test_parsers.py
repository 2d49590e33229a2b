"""Every format, in pieces of every size: the same reasoning, text and calls, and nothing shown twice or lost."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from holdfast.errors import ConfigError, UnsupportedParameter
from router.formats.deltas import Delta
from router.formats.families import CALLS, REASONING, call_tag, detect_calls, detect_reasoning
from router.formats.style import AnswerStyle, Function
from tests.schemas import check
from tests.workers.grammar.test_compiler import accepts, compiled, random_text

PARIS, NOW = {"city": 'Paris, "FR"', "days": [1, 2]}, {"zone": "UTC"}
PARIS_JSON, NOW_JSON = json.dumps(PARIS), json.dumps(NOW)
DEEPSEEK = ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>")
DEEPSEEK_END = "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
SAID = "Let me see.\n"

OUTPUTS: dict[str, str] = {
    "hermes": f'{SAID}<tool_call>\n{{"name": "weather", "arguments": {PARIS_JSON}}}\n</tool_call>\n'
    f'<tool_call>\n{{"arguments": {NOW_JSON}, "name": "now"}}\n</tool_call>',
    "mistral": f'{SAID}[TOOL_CALLS] [{{"name": "weather", "arguments": {PARIS_JSON}}}, '
    f'{{"name": "now", "arguments": {NOW_JSON}}}]',
    "mistral_v11": f"{SAID}[TOOL_CALLS]weather[ARGS]{PARIS_JSON}[TOOL_CALLS]now[ARGS]{NOW_JSON}",
    "deepseekv3": f"{SAID}{DEEPSEEK[0]}function<｜tool▁sep｜>weather\n```json\n{PARIS_JSON}\n```"
    f"{DEEPSEEK[1]}function<｜tool▁sep｜>now\n```json\n{NOW_JSON}\n```{DEEPSEEK_END}",
    "deepseekv31": f"{SAID}{DEEPSEEK[0]}weather<｜tool▁sep｜>{PARIS_JSON}"
    f"{DEEPSEEK[1]}now<｜tool▁sep｜>{NOW_JSON}{DEEPSEEK_END}",
    "gpt-oss": f"<|channel|>final<|message|>{SAID}<|end|><|start|>assistant"
    f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{PARIS_JSON}<|call|>"
    f"<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{NOW_JSON}",
    "llama3": f'{SAID}<|python_tag|>{{"name": "weather", "parameters": {PARIS_JSON}}}; '
    f'{{"name": "now", "parameters": {NOW_JSON}}}',
    "glm45": f'{SAID}<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris, "FR"</arg_value>\n'
    "<arg_key>days</arg_key>\n<arg_value>[1, 2]</arg_value>\n</tool_call>\n"
    "<tool_call>now\n<arg_key>zone</arg_key>\n<arg_value>UTC</arg_value>\n</tool_call>",
    "gemma": f"{SAID}<start_function_call>call:weather"
    '{city:<escape>Paris, "FR"<escape>,days:[1, 2]}<end_function_call>'
    "<start_function_call>call:now{zone:<escape>UTC<escape>}<end_function_call>",
    "pythonic": "[weather(city='Paris, \"FR\"', days=[1, 2]), now(zone='UTC')]",
}
PLAIN = ("Plain, with [brackets], {braces} and <tags>.", '{"city": "Paris"}', "[1, 2, 3]", "", " ", "<tool", "[TOOL")


def parse(parser: Any, text: str, size: int) -> tuple[Delta, list[Delta]]:
    """The whole, and its pieces, for a text that comes ``size`` characters at a time."""
    pieces = [parser.push(text[i : i + size]) for i in range(0, len(text), size)] + [parser.finish()]
    whole = Delta()
    for piece in pieces:
        whole.add(Delta(piece.text, piece.reasoning, [type(c)(c.index, c.name, c.arguments) for c in piece.calls]))
    return whole, pieces


@pytest.mark.parametrize("size", [1, 2, 7, 10_000])
@pytest.mark.parametrize("name", sorted(CALLS))
def test_calls(name: str, size: int) -> None:
    whole, _ = parse(CALLS[name].parser(), OUTPUTS[name], size)
    assert [(call.index, call.name, json.loads(call.arguments)) for call in whole.calls] == [
        (0, "weather", PARIS),
        (1, "now", NOW),
    ]
    assert whole.text.strip() == ("" if name == "pythonic" else "Let me see.")


@pytest.mark.parametrize("size", [1, 3, 10_000])
@pytest.mark.parametrize("name", sorted(CALLS))
@pytest.mark.parametrize("text", PLAIN)
def test_what_is_no_call_is_text(name: str, text: str, size: int) -> None:
    if name == "gpt-oss" and text:
        text = f"<|channel|>final<|message|>{text}"
    whole, _ = parse(CALLS[name].parser(), text, size)
    assert not whole.calls and whole.text == text.removeprefix("<|channel|>final<|message|>")


@pytest.mark.parametrize("name", ["hermes", "mistral", "mistral_v11", "deepseekv31", "deepseekv3", "llama3", "gpt-oss"])
def test_arguments_come_as_they_are_written(name: str) -> None:
    _, pieces = parse(CALLS[name].parser(), OUTPUTS[name], 1)
    first = [call.arguments for piece in pieces for call in piece.calls if call.index == 0]
    assert len(first) > 20 and "".join(first) == json.dumps(PARIS)
    assert [call.name for piece in pieces for call in piece.calls if call.name] == ["weather", "now"]


@pytest.mark.parametrize("cut", range(1, 130, 9))
def test_a_call_that_is_cut_by_length_is_not_invented(cut: int) -> None:
    whole, _ = parse(CALLS["hermes"].parser(), OUTPUTS["hermes"][:cut], 3)
    assert SAID.startswith(whole.text[: len(SAID)])
    assert all(PARIS_JSON.startswith(call.arguments) and call.name == "weather" for call in whole.calls)


@pytest.mark.parametrize("size", [1, 2, 5, 10_000])
@pytest.mark.parametrize(
    ("calls", "reasoning", "prompt", "text", "expected"),
    [
        ("none", "qwen3", "", "<think>\nHm. </think>\n\nYes <b>", ("Hm. ", "Yes <b>")),
        ("none", "qwen3", "", "No thought.", ("", "No thought.")),
        ("none", "qwen3", "...<think>\n", "Hm.</think>Yes", ("Hm.", "Yes")),
        ("none", "deepseek-r1", "", "Hm.</think>Yes", ("Hm.", "Yes")),
        ("none", "deepseek-r1", "", "Hm, cut", ("Hm, cut", "")),
        ("none", "mistral", "", "[THINK]Hm.[/THINK]Yes", ("Hm.", "Yes")),
        (
            "gpt-oss",
            "gpt-oss",
            "",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes",
            ("Hm.", "Yes"),
        ),
    ],
)
def test_reasoning(calls: str, reasoning: str, prompt: str, text: str, expected: tuple[str, str], size: int) -> None:
    style = AnswerStyle(calls, reasoning, "")
    whole, _ = parse(style.parser(prompt, calls=False, reasoning=True), text, size)
    assert (whole.reasoning, whole.text) == expected


def test_calls_after_reasoning() -> None:
    style = AnswerStyle("hermes", "qwen3", "")
    whole, _ = parse(style.parser("", calls=True, reasoning=True), f"<think>Hm.</think>\n\n{OUTPUTS['hermes']}", 4)
    assert whole.reasoning == "Hm." and whole.text.strip() == "Let me see." and len(whole.calls) == 2


@pytest.mark.parametrize(
    ("template", "calls", "reasoning"),
    [
        ("{{'<tool_call>\\n' + tool_call}}", "hermes", ""),
        ("{{'<tool_call>'}}<arg_key>{{'</think>'}}", "glm45", "qwen3"),
        ("[TOOL_CALLS] [", "mistral", ""),
        ("[TOOL_CALLS]{{name}}[ARGS]", "mistral_v11", ""),
        ("<|start|>assistant<|channel|>analysis", "gpt-oss", "gpt-oss"),
        ("{{- '<|python_tag|>' }}", "llama3", ""),
        ("<start_function_call>", "gemma", ""),
        ("{% for message in messages %}{% endfor %}", "", ""),
    ],
)
def test_formats_are_found_in_templates(template: str, calls: str, reasoning: str) -> None:
    assert (detect_calls(template), detect_reasoning(template)) == (calls, reasoning)


def test_unknown_names_are_refused() -> None:
    for given in (("x", None), (None, "x")):
        with pytest.raises(ConfigError, match="'x' is unknown"):
            AnswerStyle(*given, "")


SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FUNCTIONS = [Function("weather", SCHEMA, False), Function("now.utc", None, False)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("name", sorted(set(CALLS) - {"gpt-oss", "glm45"}))
def test_required_calls_are_always_read(name: str, parallel: bool, seed: int) -> None:
    """Whatever tokens a model prefers, the grammar makes calls that the parser reads, of the schema."""
    style = AnswerStyle(name, "none", "")
    functions = FUNCTIONS[:1] if seed else FUNCTIONS
    grammar = style.calls_grammar(functions, "", required=True, parallel=parallel)
    assert grammar is not None
    tag = compiled("structural_tag", grammar.structural_tag)
    texts = (random_text(tag.deep_copy(), random.Random(seed + 7 * attempt)) for attempt in range(50))
    text = next(text for text in texts if text is not None)
    check_calls(style, name, text)
    assert parallel or len(parse(style.parser("", calls=True, reasoning=False), text, 3)[0].calls) == 1


def check_calls(style: AnswerStyle, name: str, text: str) -> None:
    whole, _ = parse(style.parser("", calls=True, reasoning=True), text, 3)
    assert whole.calls and not whole.text.strip(), text
    for call in whole.calls:
        assert call.name in ("weather", "now.utc")
        if call.name == "weather":
            check(call.arguments, SCHEMA)


CALL = '<tool_call>\n{"name": "weather", "arguments": @}\n</tool_call>'
ROME = '{"city": "Rome", "days": 3}'


@pytest.mark.parametrize(
    ("calls", "reasoning", "prompt", "text"),
    [
        (
            "hermes",
            "qwen3",
            "",
            f"<think>\nHm.</think>\n\n{CALL}",
        ),
        ("hermes", "qwen3", "", CALL),
        (
            "hermes",
            "qwen3",
            "<think>\n",
            f"Hm.</think>\n\n{CALL}",
        ),
        ("hermes", "deepseek-r1", "", f"Hm.</think>{CALL}"),
        # Its calls end with a token that ends the bundled model's output too, so that this is without reasoning.
        ("gpt-oss", "gpt-oss", "", "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>@<|call|>"),
    ],
)
def test_required_calls_may_follow_reasoning(calls: str, reasoning: str, prompt: str, text: str) -> None:
    style = AnswerStyle(calls, reasoning, "")
    grammar = style.calls_grammar(FUNCTIONS[:1], prompt, required=True, parallel=False)
    assert grammar is not None
    matcher = compiled("structural_tag", grammar.structural_tag)
    assert accepts(matcher, text.replace("@", ROME))
    assert not accepts(compiled("structural_tag", grammar.structural_tag), text.replace("@", '{"city": "x"}'))
    whole, _ = parse(style.parser(prompt, calls=True, reasoning=True), text.replace("@", ROME), 3)
    assert [(call.name, call.arguments) for call in whole.calls] == [("weather", ROME)]
    assert whole.reasoning == ("Hm." if "Hm." in text else "")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", f"So: {CALL}"),
        ("mistral", '[TOOL_CALLS] [{"name": "weather", "arguments": @}]'),
        ("mistral", 'So: [TOOL_CALLS] [{"name": "now.utc", "arguments": {}}, {"name": "weather", "arguments": @}]'),
        ("mistral_v11", "[TOOL_CALLS]weather[ARGS]@"),
        (
            "deepseekv3",
            "So: <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n@\n```"
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
        (
            "deepseekv31",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>@<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
    ],
)
def test_strict_calls_that_the_model_chooses(name: str, text: str) -> None:
    style = AnswerStyle(name, "none", "")
    strict = [Function("weather", SCHEMA, True), FUNCTIONS[1]]
    grammar = style.calls_grammar(strict, "", required=False, parallel=True)
    assert grammar is not None
    tag = compiled("structural_tag", grammar.structural_tag)
    assert accepts(tag.deep_copy(), text.replace("@", ROME)) and accepts(tag.deep_copy(), "It needs no call.")
    assert not accepts(tag, text.replace("@", '{"city": "x"}'))
    whole, _ = parse(style.parser("", calls=True, reasoning=False), text.replace("@", ROME), 3)
    assert (whole.calls[-1].name, whole.calls[-1].arguments) == ("weather", ROME)


def test_required_calls_without_json() -> None:
    grammar = AnswerStyle("glm45", "none", "").calls_grammar(FUNCTIONS[:1], "", required=True, parallel=False)
    assert grammar is not None
    text = (
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
    )
    assert accepts(compiled("structural_tag", grammar.structural_tag), text)
    for wrong in (text.replace("city", "town"), text.replace("Rome", "Bern"), text.replace("3", "12")):
        assert not accepts(compiled("structural_tag", grammar.structural_tag), wrong)


TYPED = {
    "type": "object",
    "properties": {
        "first": {"type": "integer", "minimum": 10},
        "name": {"type": "string"},
        "unit": {"$ref": "#/$defs/unit"},
        "on": {"type": "boolean"},
        "size": {"enum": [1, 2.5, "big", None]},
    },
    "required": ["name", "on"],
    "additionalProperties": False,
    "$defs": {"unit": {"enum": ["C", "F"], "description": "of the temperature"}},
}


@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize("name", ["gemma", "glm45", "pythonic", "llama3", "hermes", "mistral"])
def test_strict_calls_are_of_their_schemas_in_every_notation(name: str, required: bool) -> None:
    """Random outputs of the grammar, with all kinds of texts, numbers and words, and any of the optional ones."""
    style = AnswerStyle(name, "none", "")
    functions = [Function("f", TYPED, True)]
    grammar = style.calls_grammar(functions, "", required=required, parallel=False)
    assert grammar is not None
    tag, num_calls = compiled("structural_tag", grammar.structural_tag), 0
    for seed in range(60 if required else 0):
        text = random_text(tag.deep_copy(), random.Random(seed), 200)
        if text is None:
            continue
        parser = style.parser("", calls=True, reasoning=False, functions=functions)
        (call,) = parse(parser, text, 3)[0].calls
        check(call.arguments, TYPED)
        num_calls += 1
    assert num_calls > 2 or not required
    if not required:
        assert accepts(tag.deep_copy(), "It needs no call.") and accepts(tag.deep_copy(), "")
        begun = {"llama3": '{"name": "g", ', "pythonic": "[g(", "gemma": "<start_function_call>call:g{"}
        wrong = begun.get(name, "<tool_call>g\n" if name == "glm45" else None)
        assert wrong is None or not accepts(tag, wrong)


@pytest.mark.parametrize(
    ("name", "part", "named"),
    [
        ("pythonic", {"type": "array", "items": {"type": "string"}}, "x: this notation has no type 'array'"),
        ("gemma", {"type": "string", "pattern": "a+"}, "x: this notation cannot enforce 'pattern'"),
        ("glm45", {"anyOf": [{"type": "null"}, {"type": "string"}]}, "x: this notation has no type None"),
        ("glm45", {"enum": ["a<b"]}, "x: this notation cannot write 'a<b'"),
    ],
)
def test_what_a_notation_cannot_enforce_is_refused_by_name(name: str, part: dict[str, Any], named: str) -> None:
    style = AnswerStyle(name, "none", "")
    schema = {"type": "object", "properties": {"x": part}, "required": ["x"], "additionalProperties": False}
    with pytest.raises(UnsupportedParameter, match=f"strict: f: the {name} format: #/properties/{named}") as refused:
        style.calls_grammar([Function("f", schema, True)], "", required=False, parallel=True)
    assert refused.value.param == "tools"
    assert style.calls_grammar([Function("f", schema, False)], "", required=True, parallel=True) is not None


def test_a_text_that_looks_like_a_number_stays_a_text() -> None:
    text = "<tool_call>f\n<arg_key>name</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
    style = AnswerStyle("glm45", "none", "")
    for functions, value in (([Function("f", TYPED, False)], "3"), ([], 3)):
        parser = style.parser("", calls=True, reasoning=False, functions=functions)
        assert json.loads(parse(parser, text, 5)[0].calls[0].arguments) == {"name": value}


def test_a_tag_names_its_function() -> None:
    assert call_tag(CALLS["hermes"], "f", {}, strict=True)["begin"] == '<tool_call>\n{"name": "f", "arguments": '
    assert set(REASONING) == {"mistral", "gpt-oss", "deepseek-r1", "qwen3"}
