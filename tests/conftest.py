"""Options of the whole suite."""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ON_RAY = ("chaos", "cluster")
"""Folders whose tests start clusters: two at once would be too much for two cores."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--schedules", type=int, default=40, help="random schedules to play on one rank and on two")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What runs in one process where tests are spread over several: a file's tests, and all those on Ray."""
    for item in items:
        name = item.path.relative_to(TESTS)
        item.add_marker(pytest.mark.xdist_group("ray" if name.parts[0] in ON_RAY else str(name)))
