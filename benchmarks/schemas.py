"""A corpus of JSON schemas, made from seeds: of the kinds that applications send."""

from __future__ import annotations

import random
from typing import Any

SIMPLE = ("string", "integer", "number", "boolean", "null", "enum", "const", "pattern", "format")
NESTED = ("object", "object", "object", "array", "array", "anyOf", "ref")
MAX_DEPTH = 3
VALUES = ("a", "b c", "ü", 1, 2.5, None, True, "<x>", 'q"')
NAMES = ("name", "id", "tags", "x", "nested", "größe", "a b", "_t")
ITEM = {
    "type": "object",
    "properties": {
        "v": {"type": "integer", "minimum": 0, "maximum": 9},
        "on": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    },
    "required": ["v"],
    "additionalProperties": False,
}


def schema(seed: int) -> dict[str, Any]:
    """An object whose every text is finite, so that an output ends."""
    rng = random.Random(seed)
    return _object(rng, 0) | {"$defs": {"item": ITEM}}


def corpus(size: int) -> list[dict[str, Any]]:
    return [schema(seed) for seed in range(size)]


def _part(rng: random.Random, depth: int) -> dict[str, Any]:
    kind = rng.choice(SIMPLE + NESTED if depth < MAX_DEPTH else SIMPLE)
    make: dict[str, Any] = {
        "string": lambda: {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(3, 12)},
        "integer": lambda: {"type": "integer", "minimum": -5, "exclusiveMaximum": rng.randint(6, 3000)},
        "number": lambda: {"type": "number", "minimum": 0, "maximum": rng.choice([1, 2.5, 100])},
        "enum": lambda: {"enum": rng.sample(VALUES, rng.randint(1, 4))},
        "const": lambda: {"const": rng.choice(["x", 3, False, [1, 2], {"k": "v"}])},
        "pattern": lambda: {
            "type": "string",
            "pattern": rng.choice(["^[a-c]{2,4}$", r"^\d{3}-\d{2}$", "^(foo|ba[rz])$"]),
        },
        "format": lambda: {"type": "string", "format": rng.choice(["date", "time", "date-time", "uuid", "ipv4"])},
        "object": lambda: _object(rng, depth),
        "array": lambda: {
            "type": "array",
            "items": _part(rng, depth + 1),
            "minItems": rng.randint(0, 2),
            "maxItems": 3,
        },
        "anyOf": lambda: {"anyOf": [_part(rng, depth + 1) for _ in range(rng.randint(2, 3))]},
        "ref": lambda: {"$ref": "#/$defs/item"},
    }
    return make[kind]() if kind in make else {"type": kind}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _part(rng, depth + 1) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }
