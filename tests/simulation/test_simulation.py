"""Seeds of the simulator, and the planted bugs that it must find. ``python -m tests.simulation`` plays any seeds."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys

import pytest

from tests.simulation.faults import Faults
from tests.simulation.planted import PLANTED, seeds_to_find
from tests.simulation.run import run_seed

NUM_SEEDS, NUM_SEEDS_LONG = 60, 10_000
SEEDS = (11, 17, 31, 43)
QUICK, MAX_SEEDS = 48, 1000
"""Planted bugs that are found within ``QUICK`` seeds are looked for in each test run."""
SLOW = {
    "a supervisor acts without its lease",
    "a process has no name that only one can have",
    "a fork takes no references to its pages",
    "a router rolls back the turn of another",
    "a turn that fails for want of a worker is rolled back",
    "a turn that was done when its client left is forgotten",
    "a head computes a token before its state is there",
    "a copy's checksum is ignored",
    "a page that was written again is copied",
    "a load that fails keeps its buffer",
}


def test_every_seed_keeps_the_laws(long: bool) -> None:
    seeds = range(NUM_SEEDS_LONG if long else NUM_SEEDS)
    # Not forked, because the test process has threads.
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        results = pool.map(run_seed, seeds, chunksize=5)
    failed = {f"--seeds {result.seed}": result.violations for result in results if result.violations}
    assert not failed, f"replay with python -m tests.simulation --trace: {failed}"
    assert sum(result.num_turns for result in results) > 10 * len(seeds), "the clients did something"
    assert any("failed over from" in line for result in results for line in result.trace), "turns moved"


@pytest.mark.parametrize("name", sorted(PLANTED))
def test_planted_bugs_are_found(name: str, long: bool) -> None:
    if name in SLOW and not long:
        pytest.skip("takes more seeds: make test-long")
    assert seeds_to_find(name, MAX_SEEDS if long else QUICK) is not None


def test_a_fault_that_fails_between_two_callbacks_fails_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raised in the callback that it interrupts, its error was lost, and so was what the callback would have done."""

    def strike(self: Faults) -> None:
        raise ValueError("nothing to choose from")

    async def none_at_any_time(self: Faults) -> None:
        pass

    monkeypatch.setattr(Faults, "strike", strike)
    monkeypatch.setattr(Faults, "run", none_at_any_time)
    assert set(run_seed(0).violations) == {"a fault failed: ValueError('nothing to choose from')"}


def test_a_seed_plays_the_same_everywhere() -> None:
    """Each of them with a KV store, and with another way to draft."""
    code = f"from tests.simulation.run import run_seed; [print(*run_seed(s).trace, sep='\\n') for s in {SEEDS}]"
    traces = [
        subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout.decode()
        for seed in ("1", "2")
    ]
    assert traces[0] == traces[1]
    assert traces[0].splitlines() == [line for seed in SEEDS for line in run_seed(seed).trace], (
        "nothing is left of what ran before in a process"
    )
