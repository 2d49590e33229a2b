"""Some hundred seeds of the simulator, and that it bites. ``python -m tests.simulation`` plays more."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys

import pytest

from tests.simulation.planted import PLANTED, seeds_to_find
from tests.simulation.run import run_seed

SEEDS = range(200)
QUICK = 40
"""The planted bugs that are found within so many seeds are looked for at each test run."""
SLOW = {"a router rolls back the turn of another", "a turn that was done when its client left is forgotten"}


def test_every_seed_keeps_the_laws() -> None:
    # Not forked: the test process has threads by now.
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        results = pool.map(run_seed, SEEDS, chunksize=5)
    failed = {f"--seeds {result.seed}": result.violations for result in results if result.violations}
    assert not failed, f"replay with python -m tests.simulation --trace: {failed}"
    assert sum(result.num_turns for result in results) > 10 * len(SEEDS), "the clients did something"
    assert any("moved from" in line for result in results for line in result.trace), "turns moved"


@pytest.mark.parametrize("name", sorted(PLANTED.keys() - SLOW))
def test_planted_bugs_are_found(name: str) -> None:
    assert seeds_to_find(name, QUICK) is not None


def test_a_seed_plays_the_same_everywhere() -> None:
    code = "from tests.simulation.run import run_seed; print(*run_seed(11).trace, sep='\\n')"
    traces = [
        subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout.decode()
        for seed in ("1", "2")
    ]
    assert traces[0] == traces[1]
    assert traces[0].splitlines() == run_seed(11).trace, "nothing is left of what ran before in a process"
