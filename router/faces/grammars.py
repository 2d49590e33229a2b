"""What constrains an output, in the forms in which OpenAI, vLLM and SGLang take it, as one ``Grammar``."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, Field

from holdfast.errors import InvalidRequest
from holdfast.v1 import session_pb2
from router.faces.fields import MAX_GRAMMAR, OpenAIBody, grammar_len

MAX_CHOICES = 1024
Text: TypeAlias = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR)]
Choices: TypeAlias = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)]
Schema: TypeAlias = dict[str, Any] | str
"""A JSON schema, or its text."""


class JsonSchema(BaseModel):
    """OpenAI's ``json_schema``. Its schema is enforced whether it is ``strict`` or not."""

    name: str = ""
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextFormat(BaseModel):
    type: Literal["text"]


class JsonObjectFormat(BaseModel):
    type: Literal["json_object"]


class JsonSchemaFormat(BaseModel):
    type: Literal["json_schema"]
    json_schema: JsonSchema


class StructuralTagFormat(BaseModel, extra="allow"):
    """SGLang's: the structural tag is the format itself."""

    type: Literal["structural_tag"]


ResponseFormat: TypeAlias = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat, Field(discriminator="type")
]


class StructuredOutputs(BaseModel):
    """vLLM's ``structured_outputs``."""

    json_: Schema | None = Field(None, alias="json")
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    json_object: bool | None = None
    structural_tag: Schema | None = None


class GrammarFields(OpenAIBody):
    """Of chat and plain completions."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None
    json_schema: Schema | None = None
    regex: Text | None = None
    ebnf: Text | None = None

    def grammar(self) -> session_pb2.Grammar | None:
        """Raises InvalidRequest if there are several."""
        outputs = self.structured_outputs or StructuredOutputs()
        return only_one(
            of_response_format(self.response_format, "response_format"),
            of_schema(outputs.json_, "structured_outputs.json"),
            of_schema({"type": "object"} if outputs.json_object else None, "structured_outputs.json_object"),
            of_text("regex", outputs.regex, "structured_outputs.regex"),
            of_choices(outputs.choice, "structured_outputs.choice"),
            of_text("ebnf", outputs.grammar, "structured_outputs.grammar"),
            of_structural_tag(outputs.structural_tag, "structured_outputs.structural_tag"),
            of_schema(self.guided_json, "guided_json"),
            of_text("regex", self.guided_regex, "guided_regex"),
            of_choices(self.guided_choice, "guided_choice"),
            of_text("ebnf", self.guided_grammar, "guided_grammar"),
            of_schema(self.json_schema, "json_schema"),
            of_text("regex", self.regex, "regex"),
            of_text("ebnf", self.ebnf, "ebnf"),
        )


def only_one(*given: session_pb2.Grammar | None) -> session_pb2.Grammar | None:
    """The one grammar of a request, if it has one. Raises InvalidRequest for several, or one that is too long."""
    found = [grammar for grammar in given if grammar is not None]
    if len(found) > 1:
        names = " and ".join(grammar.param for grammar in found)
        raise InvalidRequest(f"set only one of {names}: an output has one grammar", found[1].param)
    if found and grammar_len(found[0]) > MAX_GRAMMAR:
        raise InvalidRequest(f"{found[0].param}: longer than {MAX_GRAMMAR} characters", found[0].param)
    return found[0] if found else None


def of_response_format(form: ResponseFormat | None, param: str) -> session_pb2.Grammar | None:
    """OpenAI's ``response_format``."""
    if isinstance(form, JsonObjectFormat):
        return of_schema({"type": "object"}, param)
    if isinstance(form, JsonSchemaFormat):
        schema = form.json_schema.schema_
        return of_schema({"type": "object"} if schema is None else schema, f"{param}.json_schema.schema")
    if isinstance(form, StructuralTagFormat):
        return of_structural_tag(form.model_dump(), param)
    return None


def of_schema(schema: Schema | None, param: str) -> session_pb2.Grammar | None:
    """A JSON schema. Raises InvalidRequest if its text is not JSON."""
    return None if schema is None else session_pb2.Grammar(json_schema=_json_text(schema, param), param=param)


def of_structural_tag(tag: Schema | None, param: str) -> session_pb2.Grammar | None:
    """A structural tag. Raises InvalidRequest if its text is not JSON."""
    return None if tag is None else session_pb2.Grammar(structural_tag=_json_text(tag, param), param=param)


def of_text(kind: Literal["regex", "ebnf"], text: str | None, param: str) -> session_pb2.Grammar | None:
    """A regular expression or a grammar."""
    if text is None:
        return None
    if kind == "regex":
        return session_pb2.Grammar(regex=text, param=param)
    return session_pb2.Grammar(ebnf=text, param=param)


def of_choices(choices: list[str] | None, param: str) -> session_pb2.Grammar | None:
    """One of several texts."""
    if choices is None:
        return None
    return session_pb2.Grammar(ebnf=f"start: {' | '.join(json.dumps(text) for text in choices)}", param=param)


def _json_text(value: Schema, param: str) -> str:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise InvalidRequest(f"{param}: not JSON: {error}", param) from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{param}: must be a JSON object", param)
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
