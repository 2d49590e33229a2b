"""What grammars cost: compiling a schema, a mask a token, and a step with constrained rows beside one without.

The floor of a mask is to read the vocabulary's bits once; of a step, the same step without grammars.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import replace
from typing import Any

from benchmarks.common import save
from benchmarks.schemas import corpus
from cluster.bench.report import percentile
from workers.config import EngineConfig
from workers.engine.leader import Leader
from workers.engine.messages import Submission
from workers.grammar.compiler import GrammarCompiler
from workers.kv.slot import new_tokens
from workers.scheduling import Grammar, SamplingParams

SCHEMAS, ROWS, STEPS, ROUNDS = 200, 16, 60, 5
CONFIG = EngineConfig(max_total_tokens=16_384, max_running_requests=ROWS, num_threads=2)
FREE = SamplingParams(max_tokens=2000, temperature=1.0, ignore_eos=True)
ENDLESS = Grammar(
    "json_schema", json.dumps({"type": "array", "items": {"type": "string"}, "minItems": 10_000}), "bench"
)
"""A text that does not end within the measured steps."""


def us(seconds: list[float]) -> dict[str, float]:
    return {"p50": round(percentile(seconds, 50) * 1e6, 1), "p99": round(percentile(seconds, 99) * 1e6, 1)}


def compile_and_mask(leader: Leader) -> dict[str, Any]:
    """Over a corpus: microseconds to compile a schema, and to make a mask along one of its texts."""
    compiler = GrammarCompiler(CONFIG.model / "tokenizer.json", 2048, tuple(leader.rank.model_config.eos_token_ids))
    compiler.compile(ENDLESS)  # loads the vocabulary
    compiling, masking = [], []
    for schema in corpus(SCHEMAS):
        began = time.perf_counter()
        matcher = compiler.compile(Grammar("json_schema", json.dumps(schema), "bench")).deep_copy()
        compiling.append(time.perf_counter() - began)
        for _ in range(100):
            began = time.perf_counter()
            mask = int.from_bytes(matcher.compute_bitmask(), "little")
            masking.append(time.perf_counter() - began)
            allowed = [token for token in range(5, 2048) if mask >> token & 1]
            if not allowed:
                break
            matcher.consume_token(allowed[len(allowed) // 2])
    return {"us to compile a schema": us(compiling), "us of a mask": us(masking)}


def step_ms(num_constrained: int) -> float:
    """Median of a decode step of ``ROWS`` rows, so many of them with a grammar."""
    leader = Leader(CONFIG, lambda updates: None, lambda error: None)
    constrained = replace(FREE, grammar=ENDLESS)
    leader._outputs.grammars.compile(ENDLESS).result()
    for i in range(ROWS):
        tokens = new_tokens(range(10 + i, 42 + i))
        params = constrained if i < num_constrained else FREE
        leader.submit(Submission(f"t{i}", f"s{i}", "", 1, tokens, len(tokens), replace(params, seed=i)))
    while not leader._commands.empty():
        command = leader._commands.get()
        assert command is not None
        command()
    while len(leader.scheduler.running) < ROWS:
        leader.step()
    times = []
    for _ in range(STEPS):
        began = time.perf_counter()
        leader.step()
        times.append(time.perf_counter() - began)
    leader._outputs.grammars.close()
    return statistics.median(times) * 1e3


def main() -> None:
    figures = compile_and_mask(Leader(CONFIG, lambda updates: None, lambda error: None))
    rows: dict[int, list[float]] = {0: [], 1: [], ROWS: []}
    for _ in range(ROUNDS):
        for num_constrained, times in rows.items():
            times.append(step_ms(num_constrained))
    steps = {f"{n} of {ROWS} rows constrained": round(statistics.median(times), 3) for n, times in rows.items()}
    ratios = {name: round(ms / next(iter(steps.values())), 3) for name, ms in steps.items()}
    save("grammars", figures | {"ms of a decode step": steps, "over a step without grammars": ratios})


if __name__ == "__main__":
    main()
