"""``python -m tests.simulation --seeds 0-9999``: play seeds; a failing one prints its trace and how to replay it."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter

from tests.simulation.run import Result, run_seed

TRACE_LINES = 60


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("--seeds", default="0-99", help="one seed, or first-last")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--trace", action="store_true", help="print the whole trace")
    given = parser.parse_args()
    first, _, last = given.seeds.partition("-")
    seeds = range(int(first), int(last or first) + 1)
    began, totals, failed = time.perf_counter(), Counter[str](), []
    with multiprocessing.Pool(min(given.processes, len(seeds)), maxtasksperchild=500) as pool:
        for result in pool.imap_unordered(run_seed, seeds, chunksize=1 if len(seeds) < 100 else 10):
            totals.update(turns=result.num_turns, tokens=result.num_tokens, simulated_s=int(result.simulated_s))
            if result.violations or given.trace:
                report(result, len(result.trace) if given.trace else TRACE_LINES)
            if result.violations:
                failed.append(result.seed)
    print(
        f"{len(seeds)} seeds, {totals['turns']} turns, {totals['tokens']} tokens, {totals['simulated_s']} simulated "
        f"seconds in {time.perf_counter() - began:.0f} s; {len(failed)} seeds failed {sorted(failed)[:50]}"
    )
    sys.exit(bool(failed))


def report(result: Result, num_lines: int) -> None:
    print(f"\nseed {result.seed}:", *result.violations, sep="\n  ")
    print(f"replay: python -m tests.simulation --seeds {result.seed} --trace", *result.trace[-num_lines:], sep="\n")


if __name__ == "__main__":
    main()
