"""An engine in this process, driven step by step: no threads, no gRPC, no Ray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from workers.config import EngineConfig
from workers.engine.leader import Leader
from workers.engine.messages import Submission, TurnUpdate
from workers.kv.slot import new_tokens
from workers.scheduling import SamplingParams

SMALL = EngineConfig(
    max_total_tokens=2048, max_running_requests=8, max_sessions=32, num_threads=2, overlap_schedule=True
)
NO_EOS = SamplingParams(max_tokens=12, ignore_eos=True)


class Engine:
    """Submits turns and steps the leader itself; updates are collected by turn id."""

    def __init__(self, config: EngineConfig = SMALL, **changes: object) -> None:
        self.updates: dict[str, list[TurnUpdate]] = {}
        self.leader = Leader(replace(config, **changes), self._take, self._crash)  # type: ignore[arg-type]
        self.cache, self.scheduler = self.leader.cache, self.leader.scheduler

    def _take(self, updates: list[TurnUpdate]) -> None:
        for update in updates:
            self.updates.setdefault(update.turn_id, []).append(update)

    def _crash(self, error: BaseException) -> None:
        raise error

    def submit(
        self, turn_id: str, session: str, tokens: Sequence[int], params: SamplingParams = NO_EOS, **more: object
    ) -> None:
        given = {"tenant": "", "epoch": 1, "prompt_len": len(tokens)} | more
        self.leader.submit(Submission(turn_id, session, tokens=new_tokens(tokens), params=params, **given))  # type: ignore[arg-type]
        self.commands()

    def commands(self) -> None:
        while not self.leader._commands.empty():
            command = self.leader._commands.get()
            assert command is not None
            command()

    def run(self, max_steps: int = 2000) -> None:
        """Step until nothing is left, with an audit after every step."""
        for _ in range(max_steps):
            if not self.scheduler.turns:
                return
            self.leader.step()
            report = self.cache.audit()
            assert report.ok, report
        raise AssertionError("turns do not end")

    def output(self, turn_id: str) -> list[int]:
        return [token for update in self.updates[turn_id] for token in update.tokens]

    def last(self, turn_id: str) -> TurnUpdate:
        return self.updates[turn_id][-1]

    def cached(self, turn_id: str) -> int:
        return next(u.cached_len for u in self.updates[turn_id] if u.cached_len is not None)

    def generate(self, session: str, tokens: Sequence[int], params: SamplingParams = NO_EOS) -> list[int]:
        """One turn from begin to end."""
        turn_id = f"turn-{len(self.updates)}"
        self.submit(turn_id, session, tokens, params)
        self.run()
        return self.output(turn_id)


def eager(leader: Leader) -> None:
    """Have a leader draft wherever it can, whatever steps cost on this machine."""
    speculation = leader.drafts.speculation
    assert speculation is not None
    speculation.costs.break_even = lambda num_rows, draft_s=0.0: 0.05  # type: ignore[method-assign]
