"""A short run of the chaos suite on real processes; ``tests.chaos.everything`` plays long ones."""

from __future__ import annotations

import asyncio
import json

from tests.chaos.everything import play

FAULTS, SEED = 5, 3


async def test_no_fault_costs_a_token() -> None:
    report = await asyncio.wait_for(play(FAULTS, SEED), 400)
    print(json.dumps(report))
    assert not report["what went wrong"], report
    assert report["pages leaked"] == 0
    assert sum(report["faults"].values()) >= FAULTS - 1 and report["turns"] > 0
