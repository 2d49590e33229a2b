"""A short run of ``holdfast chaos`` on real processes; longer ones are for ``make chaos``."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from cluster.chaos import Chaos
from tests.cluster.served import serving

FAULTS, SEED = 4, 1


async def test_no_fault_costs_a_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(tmp_path, "--workers", "2", "--tp", "2", "--routers", "2") as served:
        report = (await asyncio.wait_for(Chaos(served.urls, SEED).run(FAULTS), 300)).as_dict()
        print(json.dumps(report))
        assert not report["what went wrong"], report
        assert report["pages leaked"] == 0
        assert sum(report["faults"].values()) >= FAULTS // 2 and report["turns"] > 0
