"""A run of the chaos suite on real processes. ``python -m tests.chaos.everything`` plays any number of faults."""

from __future__ import annotations

import asyncio
import gc
import json

from tests.chaos.everything import play

FAULTS, FAULTS_LONG, SEED = 4, 40, 3
FAULT_DEADLINE_S = 140


async def test_no_fault_costs_a_token(long: bool) -> None:
    num_faults = FAULTS_LONG if long else FAULTS
    report = await asyncio.wait_for(play(num_faults, SEED), num_faults * FAULT_DEADLINE_S)
    gc.collect()  # a process that nobody has waited for fails this test, not a later one
    print(json.dumps(report))
    assert not report["failures"], report
    assert report["pages leaked"] == 0
    assert sum(report["faults"].values()) >= num_faults - 1 and report["turns"] > 0
