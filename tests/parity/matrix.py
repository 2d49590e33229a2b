"""Every session feature on every kind of KV: each cell plays its cases on real engines and returns their number.

A case compares tokens, sampled with a seed, with those of a session that was computed alone and in one piece.
``python -m tests.parity.matrix`` writes the counts to docs/models.md; ``test_matrix`` plays the cells again.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from holdfast.v1 import session_pb2 as pb
from holdfast.v1 import session_pb2_grpc
from tests.harness import Harness, running
from tests.parity.checkpoints import make_checkpoint
from tests.parity.heads import copy_tokenizer, make_mtp
from tests.simulation.model import GROUPS
from tests.simulation.run import run_seed
from tests.workers.engine import NO_EOS, Engine
from tests.workers.groups import GroupEngine
from workers.config import EngineConfig
from workers.kv.slot import new_tokens
from workers.scheduling import Draft, Turn

KINDS = {
    "full": "llama",
    "latent": "deepseek-v3",
    "window": "mistral-window",
    "full + window": "gpt-oss",
    "full + window, softcap": "gemma2",
}
"""Each kind's checkpoint. The windows are of 9 and 11 tokens, the pages of 4."""
SIMULATED = {"full": "full", "latent": "latent", "window": "window", "full + window": "full + window"}
SIMULATED["full + window, softcap"] = "window + latent + window"
CONFIG = EngineConfig(
    page_size=4,
    max_total_tokens=2048,
    max_running_requests=8,
    max_sessions=32,
    num_threads=1,
    overlap_schedule=True,
)
SAMPLED = replace(NO_EOS, temperature=0.8, top_k=40, seed=5)
PROMPTS = {f"p{i}": [(7 * i + 13 * j) % 1500 + 10 for j in range(3 + 17 * i)] for i in range(4)}
FIRST, SECOND = PROMPTS["p2"], [5, 6, 7]
NUM_SEEDS = 6


@cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    """Removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="holdfast-matrix-")


@cache
def checkpoint(kind: str) -> Path:
    """A random model of that kind, with the bundled tokenizer; of DeepSeek's, with a draft head."""
    folder = Path(_scratch().name) / KINDS[kind]
    if kind == "latent":
        make_mtp(folder)
    else:
        make_checkpoint(KINDS[kind], folder, vocab_size=2048, max_position_embeddings=512)
        copy_tokenizer(folder)
    return folder


def engine(kind: str, **changes: object) -> Engine:
    return Engine(replace(CONFIG, model=checkpoint(kind)), **changes)


@cache
def alone(kind: str, tokens: tuple[int, ...]) -> list[int]:
    """What a session says after ``tokens``, computed alone and in one piece."""
    return engine(kind).generate("s", tokens, SAMPLED)


def check(got: Sequence[int], kind: str, tokens: Sequence[int]) -> int:
    assert list(got) == alone(kind, tuple(tokens)), f"{kind}: other tokens after {len(tokens)}"
    return 1


def batch(kind: str, played: Engine, copies: int = 1) -> int:
    """All prompts at once, in one engine, each by so many sessions of different tenants."""
    turns = {f"{name}-{i}": prompt for i in range(copies) for name, prompt in PROMPTS.items()}
    for name, prompt in turns.items():
        played.submit(name, name, prompt, SAMPLED, tenant=name[-1])
    played.run()
    return sum(check(played.output(name), kind, prompt) for name, prompt in turns.items())


def chunked_prefill(kind: str) -> int:
    count = 0
    for chunk in (1, 5, 16):
        played = engine(kind, chunked_prefill_size=chunk)
        count += sum(check(played.generate(name, p, SAMPLED), kind, p) for name, p in PROMPTS.items())
    return count


def mixed_steps(kind: str) -> int:
    return sum(
        batch(kind, engine(kind, chunked_prefill_size=chunk, page_size=size)) for chunk, size in ((7, 4), (24, 16))
    )


def retract(kind: str) -> int:
    count, num_retracted = 0, 0
    for tokens in (72, 84, 96):
        played = engine(kind, max_total_tokens=tokens, chunked_prefill_size=16)
        count += batch(kind, played, copies=2)
        num_retracted += played.scheduler.num_retracted
    assert num_retracted > 0, "the pools were too large"
    return count


def abort_at_every_step(kind: str) -> int:
    count, history = 0, [*FIRST, *alone(kind, tuple(FIRST))]
    for num_steps in range(1, 16):
        played = engine(kind, chunked_prefill_size=8)
        played.generate("s", FIRST, SAMPLED)
        played.submit("doomed", "s", [*history, *range(50, 70)], SAMPLED)
        for _ in range(num_steps):
            played.leader.step()
        played.leader.abort("doomed")
        played.commands()
        played.submit("next", "s", [*history, *SECOND], SAMPLED)
        played.run()
        assert played.cached("next") >= len(history) - 1, "an abort costs nothing of the last good turn"
        count += check(played.output("next"), kind, [*history, *SECOND])
    return count


def rewind_to_every_length(kind: str) -> int:
    played, history = engine(kind), [*FIRST, *alone(kind, tuple(FIRST))]
    for length in range(len(history), 0, -1):
        name = f"s{length}"
        played.generate("s", FIRST, SAMPLED)  # whole again; what was cut is cached or computed
        cut = played.leader.free_tail("s", 1, length)
        played.commands()
        played.leader.step()
        assert cut.done()
        played.submit(name, "s", [*history[:length], *SECOND], SAMPLED)
        played.run()
        check(played.output(name), kind, [*history[:length], *SECOND])
        assert played.cache.audit().ok
    return len(history)


def fork(kind: str) -> int:
    count, history = 0, [*FIRST, *alone(kind, tuple(FIRST))]
    for at_len in (1, 4, 17, len(FIRST), len(history) - 1, len(history)):
        played = engine(kind)
        played.generate("s", FIRST, SAMPLED)
        played.leader.fork("s", "child", 1, at_len)
        played.commands()
        for session, known in (("child", history[:at_len]), ("s", history)):
            played.submit(session, session, [*known, *SECOND], SAMPLED)
        played.run()
        count += check(played.output("child"), kind, [*history[:at_len], *SECOND])
        count += check(played.output("s"), kind, [*history, *SECOND])
    return count


def prefix_hit_after_a_branch(kind: str) -> int:
    played, count = engine(kind), 0
    system = [(3 * j) % 900 + 20 for j in range(40)]
    for number, branch in enumerate(([1, 2], [1, 3, 4, 5, 6, 7], [1, 3, 4, 5, 6, 8], [9] * 12)):
        tokens = [*system, *branch]
        count += check(played.generate(f"s{number}", tokens, SAMPLED), kind, tokens)
        assert number == 0 or played.cached(f"turn-{number}") >= 36, "the common prefix is computed once"
    return count


def failover(kind: str) -> int:
    """A replay elsewhere of what was journaled, from every token on."""
    output = alone(kind, tuple(FIRST))
    for seen in range(1, len(output)):
        played = engine(kind)
        played.submit("t", "s", [*FIRST, *output[:seen]], SAMPLED, prompt_len=len(FIRST))
        played.run()
        assert played.output("t") == output[seen:], f"{kind}: other tokens after {seen}"
    return len(output) - 1


def two_ranks(kind: str) -> int:
    """Tensor parallelism, the digest compared at each step, then a second turn and a release on both ranks."""
    played = GroupEngine(2, replace(CONFIG, model=checkpoint(kind)), chunked_prefill_size=16)
    count = batch(kind, played)
    history = [*FIRST, *alone(kind, tuple(FIRST))]
    played.submit("next", "p2-0", SECOND, SAMPLED, prompt_len=len(history) + 3, tenant="0", prefix_len=len(history),
                  prefix_crc=zlib.crc32(new_tokens(history)))  # fmt: skip
    played.run()
    count += check(played.output("next"), kind, [*history, *SECOND])
    released = played.leader.release_session("p2-0", 1)
    played.commands()
    played.leader.step()
    played.settle()
    freed = {tuple(answer.pages_freed_by_group) for answer in released.result(5).ranks}
    assert len(freed) == 1 and not played.refused, "both ranks freed the same pages of each group"
    played.stop()
    return count


def speculation(kind: str) -> int:
    """Drafts of each length, right up to each of its tokens, from every token of an output on."""
    output, count = alone(kind, tuple(FIRST)), 0
    for length in (1, 3, 11):
        for num_right in range(length + 1):
            played = engine(kind, speculative_algorithm="NGRAM", page_size=4)
            drafted = FixedDrafts(played, output, num_right, length - num_right)
            count += check(played.generate("s", FIRST, SAMPLED), kind, FIRST)
            assert drafted.num_accepted == played.leader.counters["accepted_draft_tokens_ngram"]
            played.submit("next", "s", [*FIRST, *output, *SECOND], SAMPLED)
            drafted.output = alone(kind, (*FIRST, *output, *SECOND))
            played.run()
            assert played.cached("next") >= len([*FIRST, *output]) - 1, "a draft's tail leaves nothing to compute again"
            count += check(played.output("next"), kind, [*FIRST, *output, *SECOND])
    return count


class FixedDrafts:
    """Drafts of which so many tokens are right, and so many wrong."""

    def __init__(self, played: Engine, output: list[int], num_right: int, num_wrong: int) -> None:
        self.output, self._num_right, self._num_wrong, self.num_accepted = output, num_right, num_wrong, 0
        speculation = played.leader.drafts.speculation
        assert speculation is not None
        speculation.candidates = lambda num_rows: list(played.scheduler.running.values())  # type: ignore[method-assign]
        speculation.propose = self._propose  # type: ignore[method-assign]

    def _propose(self, turn: Turn, limit: int, num_rows: int) -> Draft | None:
        left = self.output[turn.num_output :]
        right = left[: min(limit, self._num_right)]
        wrong = [3 if token != 3 else 4 for token in left[len(right) :][: self._num_wrong]]
        self.num_accepted += len(right)
        draft = new_tokens([*right, *wrong][:limit])
        return Draft(draft) if draft else None


def migration(kind: str) -> int:
    """Between two workers over gRPC, then the last turn again from its start, and the next turn."""
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_migration(kind, Path(folder)))


async def _migration(kind: str, folder: Path) -> int:
    config = replace(CONFIG, model=checkpoint(kind), max_total_tokens=4096)
    history = [*FIRST, *alone(kind, tuple(FIRST))]
    async with running(folder, num_workers=1, engine=config) as cluster, cluster.channel() as channel:
        stub = session_pb2_grpc.SessionServiceStub(channel)
        assert (await _turn(stub, "s", FIRST))[0] == history[len(FIRST) :]
        count = check((await _turn(stub, "s", SECOND))[0], kind, [*history, *SECOND])
        await cluster.start_worker("w1", 1, config)
        await _migrate(cluster)
        await stub.FreeTail(pb.FreeTailRequest(session_id="s", keep_len=len(history)))
        for known in (history, [*history, *SECOND, *alone(kind, (*history, *SECOND))]):
            tokens, cached = await _turn(stub, "s", SECOND)
            assert cached >= len(known) - 1, "the pages came with the session, those of its last turn's start too"
            count += check(tokens, kind, [*known, *SECOND])
        await cluster.assert_no_leak()
    return count


async def _turn(stub: session_pb2_grpc.SessionServiceStub, session: str, ids: list[int]) -> tuple[list[int], int]:
    sampling = pb.Sampling(temperature=0.8, top_k=40, seed=5, max_tokens=12, ignore_eos=True)
    tokens: list[int] = []
    cached = 0
    call: Any = stub.Generate(pb.GenerateRequest(session_id=session, tokens=pb.TokenIds(ids=ids), sampling=sampling))
    async for answer in call:
        tokens += answer.tokens
        cached = answer.cached_tokens
    return tokens, cached


async def _migrate(cluster: Harness) -> None:
    drained = await cluster.router.core.migrator.drain("w0", 5.0)
    assert drained["sessions_migrated"] == 1, drained


def simulator(kind: str) -> int:
    """Seeds whose simulated model has these groups."""
    kinds = list(GROUPS)
    for number in range(NUM_SEEDS):
        result = run_seed(20_000 + number * len(kinds) + kinds.index(SIMULATED[kind]))
        assert not result.violations, (result.seed, result.violations)
    return NUM_SEEDS


FEATURES: dict[str, Callable[[str], int]] = {
    "chunked prefill": chunked_prefill,
    "mixed steps": mixed_steps,
    "retract": retract,
    "abort at every step": abort_at_every_step,
    "rewind to every length": rewind_to_every_length,
    "fork": fork,
    "prefix hit after a branch": prefix_hit_after_a_branch,
    "failover": failover,
    "TP 2 with digest": two_ranks,
    "speculation": speculation,
    "migration": migration,
    "simulator": simulator,
}
DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "models.md"
BEGIN, END = "<!-- matrix: written by python -m tests.parity.matrix -->\n", "<!-- end of matrix -->\n"


def row(feature: str, counts: Sequence[int]) -> str:
    return f"| {feature} | {' | '.join(str(count) for count in counts)} |\n"


def main() -> None:
    text = DOCUMENT.read_text()
    table = f"| | {' | '.join(KINDS)} |\n| --- |{' ---: |' * len(KINDS)}\n"
    for feature, play in FEATURES.items():
        table += row(feature, [play(kind) for kind in KINDS])
        print(table.splitlines()[-1], file=sys.stderr)
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    DOCUMENT.write_text(before + BEGIN + table + END + after)


if __name__ == "__main__":
    main()
