"""The Ray node of a cluster that has this machine alone.

``ray.init`` also starts Ray's autoscaler and the server of its dashboard, even where it is told to include none (Ray
2.60; ``ray start`` can leave out the first). Nothing of Holdfast asks either, and no other machine can join. Together
they take a tenth of the CPU time of a cluster's start, and 180 MB.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ray._private import node as untyped

_node: Any = untyped


class _LocalNode(_node.Node):  # type: ignore[misc]  # Ray has no types here
    def start_monitor(self) -> None:
        """Start no autoscaler."""

    def start_api_server(self, **settings: object) -> None:
        """Start no dashboard."""


@contextmanager
def started_by_init() -> Iterator[None]:
    """``ray.init`` starts such a node meanwhile."""
    kept, _node.Node = _node.Node, _LocalNode
    try:
        yield
    finally:
        _node.Node = kept
