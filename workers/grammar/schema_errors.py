"""Which part of a JSON schema makes it invalid or unsupported."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

ONE = ("items", "additionalProperties", "additionalItems", "contains", "not", "if", "then", "else", "propertyNames")
BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
SEVERAL = ("anyOf", "allOf", "oneOf", "prefixItems", "items")
DEFINITIONS = ("$defs", "definitions")


def failing_part(schema: dict[str, Any], fault_of: Callable[[dict[str, Any]], str]) -> str:
    """The JSON pointer of the innermost part that ``fault_of`` rejects by itself, if it rejects ``schema``."""
    shared = {name: schema[name] for name in DEFINITIONS if name in schema}
    for pointer, part in _parts(schema):
        # A definition that fails would fail every part: definitions are looked at one by one, without the others.
        isolated = part if any(pointer.startswith(f"/{name}/") for name in DEFINITIONS) else shared | part
        if fault_of(isolated):
            return f"{'' if pointer.startswith('#') else '#'}{pointer}{failing_part(part, fault_of).removeprefix('#')}"
    return ""


def _parts(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name in ONE:
        if isinstance(schema.get(name), dict):
            yield f"/{name}", schema[name]
    for name in BY_NAME:
        children = schema.get(name)
        for key, child in children.items() if isinstance(children, dict) else ():
            if isinstance(child, dict):
                yield f"/{name}/{str(key).replace('~', '~0').replace('/', '~1')}", child
    for name in SEVERAL:
        children = schema.get(name)
        for index, child in enumerate(children) if isinstance(children, list) else ():
            if isinstance(child, dict):
                yield f"/{name}/{index}", child
