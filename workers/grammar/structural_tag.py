"""Structural tags, tagged parts of free text, as a Lark grammar of llguidance.

The formats are those of xgrammar (https://xgrammar.mlc.ai/docs/tutorials/structural_tag), which SGLang and vLLM
take too, and SGLang's first form with ``structures`` and ``triggers``. How free text ends at a trigger:
https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md (lazy rules).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

ANY_TEXT = r"/(.|\n)*/"


def lark_of(tag: Any, special_tokens: Mapping[str, int], json_options: Mapping[str, Any]) -> str:
    """The Lark grammar of a structural tag. ``special_tokens``: their ids by text. Raises ValueError, KeyError."""
    if not isinstance(tag, dict) or tag.get("type") != "structural_tag":
        raise ValueError('a structural tag must be an object with "type": "structural_tag"')
    form = tag["format"] if "format" in tag else _first_form(tag)
    return _Writer(special_tokens, json_options).grammar(form)


def schemas_of(tag: Any, place: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """The JSON schemas in a structural tag, each with its place there, a JSON pointer."""
    parts = tag.items() if isinstance(tag, dict) else enumerate(tag) if isinstance(tag, list) else ()
    for key, part in parts:
        if key in ("json_schema", "schema") and isinstance(part, dict):
            yield f"{place}/{key}", part
        else:
            yield from schemas_of(part, f"{place}/{key}")


def _first_form(tag: dict[str, Any]) -> dict[str, Any]:
    tags = [
        {"begin": s["begin"], "content": {"type": "json_schema", "json_schema": s["schema"]}, "end": s["end"]}
        for s in tag["structures"]
    ]
    return {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}


class _Writer:
    """Writes one rule for each part of a format; a rule's name is ``r`` and a number."""

    def __init__(self, special_tokens: Mapping[str, int], json_options: Mapping[str, Any]) -> None:
        self._special = special_tokens
        self._split = re.compile("|".join(map(re.escape, sorted(special_tokens, key=len, reverse=True))) or r"(?!)")
        self._json_options = json_options
        self._rules: list[str] = []
        self._num_rules = 0

    def grammar(self, form: Any) -> str:
        start = self._of(form)
        return "\n".join([f"start: {start}", f"TEXT: {ANY_TEXT}", *self._rules])

    def _rule(self, body: str, attributes: str = "") -> str:
        name = f"r{self._num_rules}"
        self._num_rules += 1
        self._rules.append(f"{name}{attributes}: {body}")
        return name

    def _literal(self, text: str) -> str:
        """A text, in which special tokens stand for themselves. "" is nothing."""
        parts, at = [], 0
        for match in self._split.finditer(text):
            parts += [json.dumps(text[at : match.start()])] if match.start() > at else []
            parts.append(f"<[{self._special[match[0]]}]>")
            at = match.end()
        return " ".join(parts + ([json.dumps(text[at:])] if at < len(text) else []))

    def _of(self, form: Any) -> str:
        kind = form.get("type") if isinstance(form, dict) else None
        write = getattr(self, f"_{kind}", None) if kind in FORMATS else None
        if write is None:
            raise ValueError(f"format {kind!r} is not supported; supported: {', '.join(sorted(FORMATS))}")
        name: str = write(form)
        return name

    def _const_string(self, form: dict[str, Any]) -> str:
        return self._rule(self._literal(form["value"]))

    def _json_schema(self, form: dict[str, Any]) -> str:
        schema = form["json_schema"]
        if form.get("style", "json") != "json":
            raise ValueError(f"json_schema: style {form['style']!r} is not supported; supported: json")
        schema = schema if isinstance(schema, dict) else {} if schema is True else None
        if schema is None:
            raise ValueError("json_schema must be an object")
        return self._rule(f"%json {json.dumps(schema | {'x-guidance': dict(self._json_options)})}")

    def _any_text(self, form: dict[str, Any]) -> str:
        if form.get("excludes"):
            raise ValueError("any_text: excludes is not supported")
        return self._rule("TEXT")

    def _regex(self, form: dict[str, Any]) -> str:
        return self._rule("/" + re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", form["pattern"]) + "/")

    def _sequence(self, form: dict[str, Any]) -> str:
        return self._rule(" ".join(self._of(part) for part in form["elements"]))

    def _or(self, form: dict[str, Any]) -> str:
        return self._rule(" | ".join(self._of(part) for part in form["elements"]))

    def _optional(self, form: dict[str, Any]) -> str:
        return self._rule(f"{self._of(form['content'])}?")

    def _tag(self, form: dict[str, Any], begin: str | None = None) -> str:
        """``begin``: what of the tag's own beginning is still to come."""
        ends = form["end"] if isinstance(form["end"], list) else [form["end"]]
        opening = self._literal(form["begin"] if begin is None else begin)
        if form["content"].get("type") == "any_text" and all(ends):
            return self._rule(f"{opening} ({' | '.join(self._text_until(end) for end in ends)})")
        closing = " | ".join(self._literal(end) or '""' for end in ends)
        return self._rule(f"{opening} {self._of(form['content'])} ({closing})")

    def _text_until(self, end: str) -> str:
        """Any text up to the first ``end``. Text holds no special token, so one of these ends it by itself."""
        special = self._split.search(end)
        plain = end[: special.start()] if special is not None else end
        if not plain:
            return self._rule(f"TEXT {self._literal(end)}")
        first = self._rule(f"TEXT {json.dumps(plain)}", "[lazy]")
        return self._rule(f"{first} {self._literal(end[len(plain) :])}") if special is not None else first

    def _triggered_tags(self, form: dict[str, Any]) -> str:
        choices = []
        for tag in form["tags"]:
            trigger = next((t for t in form["triggers"] if t and tag["begin"].startswith(t)), None)
            if trigger is None:
                raise ValueError(f"triggered_tags: no trigger begins the tag {tag['begin']!r}")
            rest = self._tag(tag, tag["begin"][len(trigger) :])
            choices.append(self._rule(f"{self._text_until(trigger)} {rest}"))
        if not choices:
            raise ValueError("triggered_tags: tags must not be empty")
        tags = self._rule(" | ".join(choices))
        if form.get("stop_after_first"):
            return self._rule(tags if form.get("at_least_one") else f"{tags} | TEXT")
        return self._rule(f"{tags}{'+' if form.get('at_least_one') else '*'} TEXT")

    def _tags_with_separator(self, form: dict[str, Any]) -> str:
        if not form["tags"]:
            raise ValueError("tags_with_separator: tags must not be empty")
        tag = self._rule(" | ".join(self._tag(tag) for tag in form["tags"]))
        more = "" if form.get("stop_after_first") else f" ({self._literal(form['separator'])} {tag})*"
        some = self._rule(f"{tag}{more}")
        return some if form.get("at_least_one") else self._rule(f"{some}?")


FORMATS = frozenset(
    {
        "const_string",
        "json_schema",
        "any_text",
        "regex",
        "sequence",
        "or",
        "optional",
        "tag",
        "triggered_tags",
        "tags_with_separator",
    }
)
