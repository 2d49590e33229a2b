"""Options of the whole suite, and how it is spread over processes."""

from __future__ import annotations

import os
import threading
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from cluster.ray_backend.nodes import prepare_environment

FIRST = ("tests/chaos/", "tests/simulation/", "tests/cluster/", "tests/docs/")
"""The folders with the longest files. Chaos is first, beside what starts no cluster: it leaves none time to start."""
RAY_SETTINGS = {
    # A dead node is noticed after 5 probes without an answer: in 2.5 s here, in 15 s by default. Each probe
    # still has its 10 s, so that a busy machine does not look dead.
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_initial_delay_ms": "500",
}
HANGING_AFTER_TIMEOUT_S = 120
"""A test that failed at its ``--timeout`` has ended by then, or it waits for a thread that never ends."""

os.environ["TRITON_INTERPRET"] = "1"  # before a kernel is imported: it is compiled, or interpreted, for good


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="every seed, more schedules, examples and faults: hours")


def pytest_configure(config: pytest.Config) -> None:
    # No deadline: an example that is slow on a busy machine is not wrong.
    settings.register_profile("holdfast", max_examples=20_000 if config.getoption("--long") else 300, deadline=None)
    settings.load_profile("holdfast")
    prepare_environment()  # for the Ray nodes that tests start by themselves
    for name, value in RAY_SETTINGS.items():
        os.environ.setdefault(name, value)


@pytest.fixture(scope="session")
def long(request: pytest.FixtureRequest) -> bool:
    """Whether the long versions of the tests run."""
    return bool(request.config.getoption("--long"))


class _Files(LoadScopeScheduling):  # type: ignore[misc]  # xdist is untyped
    """A file's tests run in one process, for they share clusters; the longest files start first."""

    def _split_scope(self, nodeid: str) -> str:
        return nodeid.partition("::")[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return _Files(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def turn(item: pytest.Item) -> int:
        return next((i for i, folder in enumerate(FIRST) if item.nodeid.startswith(folder)), len(FIRST))

    items.sort(key=turn)  # stable: within a file nothing moves


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """End the process, which is reported as a failure of the test, where a timeout does not end the test."""
    timeout = item.config.getoption("timeout")
    if not timeout:
        return (yield)
    timer = threading.Timer(timeout + HANGING_AFTER_TIMEOUT_S, os._exit, (1,))
    timer.daemon = True
    timer.start()
    try:
        return (yield)
    finally:
        timer.cancel()
