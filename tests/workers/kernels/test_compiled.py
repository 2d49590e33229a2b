"""The kernels as compilers for GPUs see them: docs/kernels.md says it, and it is so."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
COLUMNS = ("kernel", "heads", "target", "registers", "spilled_bytes", "shared", "tensor_cores")
SOME = [
    ("extend", "Gemma 2 27B, window", "sm_80"),
    ("extend", "Llama 3.1 8B", "sm_90"),
    ("decode", "gpt-oss 20B, window", "sm_100"),
    ("extend", "DeepSeek V3, TP 8", "gfx942"),
    ("sum of splits", "Llama 3.1 8B", "sm_90"),
    ("norm, rotate, write", "Qwen3 8B", "sm_90"),
    ("experts, gate and up, MXFP4", "gpt-oss 20B", "sm_90"),
    ("product, gate and up", "Llama 3.1 8B", "sm_90"),
    ("decode", "Llama 3.1 8B, fp8 KV", "sm_80"),
]
"""The largest of each target. ``make test-long`` compiles all."""


def documented() -> dict[tuple[str, str, str], dict[str, str]]:
    text = (ROOT / "docs" / "kernels.md").read_text()
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if re.search(r"\| (sm_\d+|gfx\w+) \|", line)]
    return {(line[0], line[1], line[2]): dict(zip(COLUMNS, line, strict=True)) for line in lines}


def test_nothing_spills_and_all_of_it_fits() -> None:
    rows = documented()
    assert len(rows) >= 50 and {target for *_, target in rows} == {"sm_80", "sm_90", "sm_100", "gfx942"}
    for (kernel, *_), row in rows.items():
        used, limit = map(int, re.findall(r"\d+", row["shared"]))
        assert row["spilled_bytes"] == "0" and used <= limit
        multiplies = kernel in ("decode", "extend") or kernel.startswith(("experts", "product"))
        assert multiplies == (row["tensor_cores"] != "-")


def test_the_compilers_still_say_so(long: bool, tmp_path: Path) -> None:
    rows = documented()
    cases = list(rows) if long else SOME
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-W", "ignore", "-m", "tests.workers.kernels.compiled", json.dumps(cases)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    for found in json.loads(done.stdout):
        known = rows[found["kernel"], found["heads"], found["target"]]
        assert (found["registers"], found["spilled_bytes"]) == (int(known["registers"]), int(known["spilled_bytes"]))
        assert round(found["shared_kb"]) == int(known["shared"].split()[0])
        assert (found["tensor_cores"] or "-") == known["tensor_cores"]
