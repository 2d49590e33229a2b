"""Options of the whole suite."""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from cluster.nodes import prepare_environment

ON_RAY = ("tests/chaos/", "tests/cluster/")
"""Folders whose tests start clusters: two at once would be too much for two cores."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--schedules", type=int, default=40, help="random schedules to play on one rank and on two")


def pytest_configure() -> None:
    prepare_environment()  # for the Ray nodes that tests start by themselves


class _Groups(LoadScopeScheduling):  # type: ignore[misc]
    """What runs in one process where tests are spread over several: a file's tests, and all those on Ray."""

    def _split_scope(self, nodeid: str) -> str:
        return "ray" if nodeid.startswith(ON_RAY) else nodeid.partition("::")[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return _Groups(config, log)
