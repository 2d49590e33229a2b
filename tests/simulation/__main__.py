"""``python -m tests.simulation --seeds 0-9999``: play seeds; a failing one prints its trace and how to replay it.

``--planted`` plants each known bug in turn, and counts the seeds that it takes to find it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.simulation.planted import PLANTED, seeds_to_find
from tests.simulation.run import Result, run_seed

TRACE_LINES = 60
MAX_SEEDS_TO_FIND = 1000


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("--seeds", default="0-99", help="one seed, or first-last")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--trace", action="store_true", help="print the whole trace")
    parser.add_argument("--planted", action="store_true", help="count the seeds that find each planted bug")
    parser.add_argument("--out", type=Path, help="keep the figures in this file, beside what it has")
    given = parser.parse_args()
    with multiprocessing.Pool(given.processes, maxtasksperchild=50) as pool:
        figures, ok = planted(pool) if given.planted else seeds(pool, given.seeds, given.trace)
    print(json.dumps(figures, indent=2))
    if given.out is not None:
        known = json.loads(given.out.read_text()) if given.out.exists() else {}
        given.out.write_text(json.dumps(known | figures, indent=2) + "\n")
    sys.exit(not ok)


def seeds(pool: Any, which: str, trace: bool) -> tuple[dict[str, Any], bool]:
    first, _, last = which.partition("-")
    numbers = range(int(first), int(last or first) + 1)
    began, totals, failed = time.perf_counter(), Counter[str](), []
    for result in pool.imap_unordered(run_seed, numbers):
        totals.update(turns=result.num_turns, tokens=result.num_tokens)
        totals.update({"sessions migrated": result.num_migrated})
        totals.update({"simulated s": round(result.simulated_s), "callbacks": result.num_callbacks})
        if result.violations or trace:
            report(result, len(result.trace) if trace else TRACE_LINES)
        if result.violations:
            failed.append(result.seed)
    took = round(time.perf_counter() - began)
    figures = {"seeds": len(numbers), **totals, "real s": took, "failed seeds": sorted(failed)}
    return {f"seeds {which}": figures}, not failed


def report(result: Result, num_lines: int) -> None:
    print(f"\nseed {result.seed}:", *result.violations, sep="\n  ")
    print(f"replay: python -m tests.simulation --seeds {result.seed} --trace", *result.trace[-num_lines:], sep="\n")


def planted(pool: Any) -> tuple[dict[str, Any], bool]:
    found = dict(zip(PLANTED, pool.imap(_seeds_to_find, PLANTED), strict=True))
    return {"seeds to find a planted bug": found}, None not in found.values()


def _seeds_to_find(name: str) -> int | None:
    return seeds_to_find(name, MAX_SEEDS_TO_FIND)


if __name__ == "__main__":
    main()
