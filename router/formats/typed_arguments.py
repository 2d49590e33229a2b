"""Grammars of arguments that a family does not write as JSON, from the function's JSON schema."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Tag = dict[str, Any]
"""A part of a structural tag, as ``session.proto`` takes it."""
MEANINGLESS = {"description", "title", "default", "examples", "deprecated", "$comment"}


class NotExpressible(ValueError):
    """A schema says what the notation cannot enforce."""


@dataclass(frozen=True, slots=True)
class Notation:
    """How a family writes arguments that are not JSON."""

    pair: Callable[[str], tuple[str, str]]
    """What it writes before and after the value of an argument, by name."""
    separator: str
    """Between two arguments."""
    text: tuple[str, str, str]
    """A text value: what comes before, a regular expression of it, what comes after."""
    literals: tuple[str, str, str] = ("true", "false", "null")
    nested: bool = False
    """Arrays and objects are written as JSON, and read back from it."""

    def arguments(self, schema: dict[str, Any]) -> Tag:
        """The arguments of a call, in the order of the schema. Raises NotExpressible, which names the part."""
        _only(schema, {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}, "#")
        properties: dict[str, Any] = schema.get("properties") or {}
        shared: dict[str, Any] = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        values = {name: self._value(_resolved(part, schema), shared, name) for name, part in properties.items()}
        required = set(schema.get("required") or ())
        return _sequence(list(self._pairs(list(values.items()), required, started=False)))

    def any_arguments(self, schema: dict[str, Any]) -> Tag:
        """All arguments of the schema, in its order, of any type that the notation can write."""
        before, pattern, after = self.text
        text = _sequence([_const(before), {"type": "regex", "pattern": pattern}, _const(after)])
        number = {"type": "json_schema", "json_schema": {"type": "number"}}
        value = {"type": "or", "elements": [text, number, *map(_const, self.literals)]}
        pairs = [self._pair(name, value, started=i > 0) for i, name in enumerate(schema.get("properties") or {})]
        return _sequence(pairs)

    def _pairs(self, left: list[tuple[str, Tag]], required: set[str], *, started: bool) -> Iterator[Tag]:
        """What can follow, if an argument has been written, and if none has."""
        for i, (name, value) in enumerate(left):
            pair = self._pair(name, value, started=started)
            if name in required:
                yield pair
                started = True
            elif started or not self.separator:
                yield {"type": "optional", "content": pair}
            else:  # whether a separator follows depends on this one
                rest = left[i + 1 :]
                yields = _sequence([pair, *self._pairs(rest, required, started=True)])
                skips = _sequence(list(self._pairs(rest, required, started=False)))
                yield {"type": "or", "elements": [yields, skips]}
                return

    def _pair(self, name: str, value: Tag, *, started: bool) -> Tag:
        before, after = self.pair(name)
        return _sequence([_const((self.separator if started else "") + before), value, _const(after)])

    def _value(self, schema: Any, shared: dict[str, Any], name: str) -> Tag:
        place = f"#/properties/{name}"
        if not isinstance(schema, dict):
            raise NotExpressible(f"{place}: must be an object")
        allowed = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if allowed is not None:
            _only(schema, {"enum", "const", "type"}, place)
            return {"type": "or", "elements": [self._literal(value, place) for value in allowed]}
        if schema.get("type") == "string":
            _only(schema, {"type"}, place)
            before, pattern, after = self.text
            return _sequence([_const(before), {"type": "regex", "pattern": pattern}, _const(after)])
        if schema.get("type") in ("integer", "number"):
            return {"type": "json_schema", "json_schema": schema | shared}
        if schema.get("type") in ("boolean", "null"):
            _only(schema, {"type"}, place)
            values = [True, False] if schema["type"] == "boolean" else [None]
            return {"type": "or", "elements": [self._literal(value, place) for value in values]}
        if schema.get("type") in ("array", "object") and self.nested:
            return {"type": "json_schema", "json_schema": schema | shared}
        raise NotExpressible(f"{place}: this notation has no type {schema.get('type')!r}")

    def _literal(self, value: Any, place: str) -> Tag:
        if isinstance(value, str):
            before, pattern, after = self.text
            if not re.fullmatch(pattern, value):
                raise NotExpressible(f"{place}: this notation cannot write {value!r}")
            return _const(before + value + after)
        if isinstance(value, bool) or value is None:
            return _const(self.literals[(True, False, None).index(value)])
        if isinstance(value, int | float):
            return _const(repr(value))
        raise NotExpressible(f"{place}: this notation cannot write {value!r}")


def _only(schema: dict[str, Any], known: set[str], place: str) -> None:
    others = sorted(set(schema) - known - MEANINGLESS)
    if others:
        raise NotExpressible(f"{place}: this notation cannot enforce {others[0]!r}")


def _resolved(schema: Any, root: dict[str, Any]) -> Any:
    """The definition that a ``$ref`` to one names."""
    found = (
        re.fullmatch(r"#/(\$defs|definitions)/([^/]+)", str(schema.get("$ref"))) if isinstance(schema, dict) else None
    )
    return root.get(found[1], {}).get(found[2]) if found else schema


def _const(text: str) -> Tag:
    return {"type": "const_string", "value": text}


def _sequence(parts: list[Tag]) -> Tag:
    nothing: Tag = {"type": "regex", "pattern": "()"}
    return {"type": "sequence", "elements": [part for part in parts if part.get("value") != ""] or [nothing]}


def text_arguments(schema: dict[str, Any]) -> frozenset[str]:
    """The arguments that are texts, whatever they look like."""
    parts = {name: _resolved(part, schema) for name, part in (schema.get("properties") or {}).items()}
    return frozenset(name for name, part in parts.items() if isinstance(part, dict) and _is_text(part))


def _is_text(schema: dict[str, Any]) -> bool:
    allowed = schema.get("enum", [schema["const"]] if "const" in schema else [0])
    return schema.get("type") == "string" or all(isinstance(value, str) for value in allowed)
