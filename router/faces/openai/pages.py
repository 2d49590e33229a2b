"""Pages of a list, as OpenAI's API paginates."""

from __future__ import annotations

from typing import Any

from holdfast.errors import InvalidRequest


def page_of(items: list[dict[str, Any]], limit: int, order: str, after: str) -> dict[str, Any]:
    """Up to ``limit`` items after the item ``after``, in ``order`` (asc or desc). Raises InvalidRequest."""
    if order not in ("asc", "desc"):
        raise InvalidRequest("order: must be asc or desc", "order")
    ordered = items if order == "asc" else items[::-1]
    ids = [item["id"] for item in ordered]
    if after and after not in ids:
        raise InvalidRequest(f"after: no item {after} exists", "after")
    rest = ordered[ids.index(after) + 1 :] if after else ordered
    shown = rest[:limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(rest) > limit,
    }
