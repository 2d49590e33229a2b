"""A pytest plugin that runs the tests of the engine on a GPU, in fp32 and with the tiles that it has there.

``make test-gpu``. The tests are those of every CPU, and so are the tokens that they expect.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

os.environ.pop("TRITON_INTERPRET", None)  # before a kernel is imported

from tests.parity import small_tiles
from tests.workers import engine, groups

engine.SMALL = replace(engine.SMALL, device="cuda", dtype="float32")


class LaunchedGroup(groups.GroupEngine):
    """The tests' ranks are threads of one process, and their operations are gloo's: no graph has those."""

    def __init__(self, *given: Any, **changes: Any) -> None:
        super().__init__(*given, **changes, disable_cuda_graph=True)


groups.GroupEngine = LaunchedGroup  # type: ignore[misc]
small_tiles.use_small_tiles = lambda monkeypatch: None


@pytest.fixture(scope="session")
def long() -> bool:
    """Every family, however long the interpreter would take."""
    return True
