"""The checked-in stubs are current."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_stubs_are_fresh(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(ROOT / "scripts/generate_stubs.py"), str(tmp_path)], check=True, timeout=60)
    generated = sorted(tmp_path.rglob("*_pb2*"))
    assert generated
    for path in generated:
        checked_in = ROOT / "proto" / path.relative_to(tmp_path)
        assert path.read_text() == checked_in.read_text(), f"{checked_in} is stale: run make proto"
