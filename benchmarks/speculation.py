"""Tokens/s with drafts over without: an agent that quotes, an edit with its prediction, text that nobody can guess.

The engine alone; settings take turns, and figures are medians of the rounds' ratios. The agent's answers are made to
quote lines of the tool's output by a grammar, in all settings. The edit's prediction is its output with words changed,
added and left out, as a file is before it is edited. As many turns run all the time: a turn that drafts end early makes
room for the next, as on a server. The floor is no speculation: 1.0. The ceiling is an edit that changes nothing, whose
drafts are all right: better guesses cannot bring more than that. What a second engine without drafts has, which runs
after the one with them, is what these figures are exact to: it may be 0.98.

The bundled model lies in the processor's caches, where a step takes as long as its products. What drafts are for is a
model whose weights are read from memory in each step, however many tokens it computes: ``--wide``.
"""

from __future__ import annotations

import argparse
import gc
import random
import re
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tokenizers import Tokenizer

from benchmarks.common import save, wide_model
from workers.config import BUNDLED_MODEL, EngineConfig
from workers.engine.leader import Leader
from workers.engine.messages import Submission, TurnUpdate
from workers.kv.slot import new_tokens
from workers.scheduling import Draft, Grammar, SamplingParams, Turn

CONFIG = EngineConfig(max_total_tokens=65_536, max_running_requests=32, num_threads=2, overlap_schedule=False)
ROUNDS, BATCHES = 7, (1, 4, 16)
SESSIONS = 4
"""At least, in a run: an engine's first steps find the caches full of what the one before it computed."""
WIDE, WIDE_ROUNDS, WIDE_BATCHES = 24_576, 3, (1, 4)
"""Neurons: 150 MB of weights in bf16. Steps take twenty times as long."""
OUTPUT, TURNS = 240, 4
PROMPTS = ("def main(", "Return the list of", "class Reader:", "The function takes", "for name in", "import os\n")


@dataclass(frozen=True)
class Request:
    """One turn: what it adds to its session."""

    tokens: list[int]
    params: SamplingParams
    prediction: Sequence[int] = ()


@dataclass
class Session:
    """Turns one after another."""

    name: str
    requests: list[Request]
    history: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    """Of the last turn."""


class Engine:
    """A leader that is stepped here."""

    def __init__(self, config: EngineConfig, algorithm: str = "NONE") -> None:
        self.leader = Leader(replace(config, speculative_algorithm=algorithm), self._take, self._fail)
        self.verified: list[tuple[int, int]] = []
        self.outputs: dict[str, list[int]] = {}
        """Of sessions' last turns."""
        self._live: dict[str, Session] = {}
        self._ended: list[Session] = []
        self._num_tokens = 0

    def _take(self, updates: list[TurnUpdate]) -> None:
        for update in updates:
            session = self._live[update.turn_id]
            session.output += update.tokens
            self._num_tokens += len(update.tokens)
            if update.finish is not None:
                session.history += session.output
                self.outputs[session.name] = session.output
                self._ended.append(self._live.pop(update.turn_id))

    def _fail(self, error: BaseException) -> None:
        raise error

    def run(self, sessions: Sequence[Session], at_once: int) -> float:
        """Tokens/s for as long as ``at_once`` of the sessions run: one that is done makes room for the next."""
        waiting = deque(replace(session) for session in sessions)
        compiled = [self.leader._outputs.compile(each.params) for session in sessions for each in session.requests]
        for future in compiled:
            if future is not None:
                future.result()
        self._num_tokens, began = 0, time.perf_counter()
        for _ in range(at_once):
            self._submit(waiting.popleft())
        while len(self._live) == at_once:
            self.leader.step()
            ended, self._ended = self._ended, []
            for session in ended:
                following = session if session.requests else waiting.popleft() if waiting else None
                if following is not None:
                    self._submit(following)
        seconds = time.perf_counter() - began
        num_tokens = self._num_tokens
        while self._live:
            self.leader.step()
        self._ended.clear()
        return num_tokens / seconds

    def _submit(self, session: Session) -> None:
        request, *session.requests = session.requests
        session.history = [*session.history, *request.tokens]
        session.output = []
        self._live[session.name] = session
        submission = Submission(
            session.name, session.name, "", 1, new_tokens(session.history), len(session.history), request.params,
            prediction=new_tokens(request.prediction),
        )  # fmt: skip
        self.leader.submit(submission)
        self._do_commands()

    def _do_commands(self) -> None:
        while not self.leader._commands.empty():
            command = self.leader._commands.get()
            assert command is not None
            command()

    def forget(self) -> None:
        """As a new worker: nothing cached, nothing said."""
        for session in list(self.leader.cache.slots):
            self.leader.release_session(session, 1)
        self.leader.flush()
        self._do_commands()


def note_drafts(engine: Engine) -> None:
    """Keep how long each verified draft was, and how much of it was accepted."""
    speculation = engine.leader.drafts.speculation
    assert speculation is not None
    receive = speculation.receive

    def noted(turn: Turn, draft: Draft | None, num_accepted: int) -> None:
        if draft is not None:
            engine.verified.append((len(draft.tokens), num_accepted))
        receive(turn, draft, num_accepted)

    speculation.receive = noted  # type: ignore[method-assign]


class Agents:
    """Sessions whose turns bring a tool's output, of which the answer quotes lines between words of its own."""

    name, least = "agent that quotes tool output", 2.0

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def sessions(self, count: int, seed: int) -> list[Session]:
        rng = random.Random(seed)
        return [Session(f"agent-{i}", [self._turn(rng) for _ in range(TURNS)]) for i in range(count)]

    def _turn(self, rng: random.Random) -> Request:
        lines = [
            f"src/{rng.choice(['reader', 'parser', 'main', 'tests'])}_{rng.randint(1, 99)}.py:{rng.randint(1, 400)}: "
            f"{rng.choice(['error', 'warning'])}: name '{rng.choice(['value', 'items', 'result'])}' is not defined"
            for _ in range(6)
        ]
        quoted = [re.escape(line).replace("\\ ", " ").replace("\\'", "'") for line in rng.sample(lines, 3)]
        own = "[a-z ]{8,24}"
        grammar = Grammar("regex", f"{own}\\n{quoted[0]}\\n{own}\\n{quoted[1]}\\n{quoted[2]}\\n{own}", "bench")
        tokens = self._tokenizer.encode("\nThe tool says:\n" + "\n".join(lines) + "\n").ids
        return Request(tokens, SamplingParams(max_tokens=OUTPUT, grammar=grammar))


class Edits:
    """Files that come back with a few words changed; the request predicts them as they were."""

    name = "code edit with a prediction"
    least: float | None = 3.0
    num_changes = 4

    def __init__(self, tokenizer: Tokenizer, config: EngineConfig) -> None:
        self._tokenizer, self._plain = tokenizer, Engine(config)

    def sessions(self, count: int, seed: int) -> list[Session]:
        rng = random.Random(seed)
        params = SamplingParams(max_tokens=OUTPUT, ignore_eos=True, temperature=0.7)
        requests = [
            Request(self._tokenizer.encode(rng.choice(PROMPTS)).ids, replace(params, seed=rng.randrange(10**6)))
            for _ in range(TURNS * count)
        ]
        self._plain.run([Session(str(i), [request]) for i, request in enumerate(requests)], count)
        self._plain.forget()
        before = [self._before(rng, self._plain.outputs[str(i)]) for i in range(len(requests))]
        return [
            Session(f"edit-{i}", [replace(request, prediction=prediction)])
            for i, (request, prediction) in enumerate(zip(requests, before, strict=True))
        ]

    def _before(self, rng: random.Random, output: list[int]) -> list[int]:
        before = list(output)
        for at in sorted(rng.sample(range(20, OUTPUT - 20), self.num_changes), reverse=True):
            before[at : at + rng.randint(0, 6)] = rng.choices(range(100, 2000), k=rng.randint(0, 6))
        return before


class Unchanged(Edits):
    """Files that come back as the request predicts them."""

    name, least = "ceiling: an edit that changes nothing", None
    num_changes = 0


class FreeText:
    """Sampled text."""

    least = 0.97

    def __init__(self, tokenizer: Tokenizer, temperature: float) -> None:
        self.name = f"free text at temperature {temperature:g}"
        self._tokenizer, self._temperature = tokenizer, temperature

    def sessions(self, count: int, seed: int) -> list[Session]:
        rng = random.Random(seed)
        params = SamplingParams(max_tokens=OUTPUT, ignore_eos=True, temperature=self._temperature)
        texts = []
        for i in range(TURNS * count):
            tokens = self._tokenizer.encode(rng.choice(PROMPTS)).ids + rng.choices(range(100, 2000), k=3)
            texts.append(Session(f"free-{i}", [Request(tokens, replace(params, seed=rng.randrange(10**6)))]))
        return texts


def acceptance(engine: Engine) -> dict[str, float]:
    """The share of accepted tokens by their place in a draft."""
    figures = {}
    for first, last in ((0, 0), (1, 1), (2, 3), (4, 7), (8, 15)):
        places = [(i, accepted) for size, accepted in engine.verified for i in range(first, min(last + 1, size))]
        if places:
            share = sum(i < accepted for i, accepted in places) / len(places)
            figures[f"{first + 1} to {last + 1}"] = round(share, 2)
    return figures


def measure(config: EngineConfig, rounds: int, batches: Sequence[int], num_sessions: int) -> dict[str, Any]:
    """The figures of a model, by workload. ``num_sessions``: of a run, at least."""
    tokenizer = Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))
    workloads: list[Any] = [
        Agents(tokenizer), Edits(tokenizer, config), Unchanged(tokenizer, config),
        FreeText(tokenizer, 0.0), FreeText(tokenizer, 1.0),
    ]  # fmt: skip
    figures: dict[str, Any] = {}
    for workload in workloads:
        rows: dict[str, Any] = {"goal": workload.least}
        for batch in batches:
            engines = Engine(config), Engine(config, "NGRAM"), Engine(config)
            drafting = engines[1]
            note_drafts(drafting)
            gc.collect()
            gc.freeze()  # as a rank does when it has started
            ratios, of_plain = list[float](), list[float]()
            for number in range(rounds + 1):
                sessions = workload.sessions(max(batch, num_sessions), number)
                rates = [engine.run(sessions, batch) for engine in engines]
                for engine in engines:
                    engine.forget()
                if number:  # the first round warms up
                    ratios.append(2 * rates[1] / (rates[0] + rates[2]))
                    of_plain.append(rates[2] / rates[0])
            gc.unfreeze()
            counters = drafting.leader.counters
            rows[f"{batch} at once"] = {
                "tokens/s, with drafts over without": round(statistics.median(ratios), 2),
                "from, to": [round(min(ratios), 2), round(max(ratios), 2)],
                "a second engine without over the first": round(statistics.median(of_plain), 2),
                "tokens a step and session": round(counters["generated_tokens"] / counters["steps"] / batch, 2),
                "accepted by place": acceptance(drafting),
            }
        figures[workload.name] = rows
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wide", action="store_true", help="a model that is read from memory")
    if not parser.parse_args().wide:
        save("speculation", measure(CONFIG, ROUNDS, BATCHES, SESSIONS))
        return
    with wide_model(WIDE) as model:
        config = replace(CONFIG, model=model, dtype="bfloat16")
        save("speculation-wide", measure(config, WIDE_ROUNDS, WIDE_BATCHES, 1))


if __name__ == "__main__":
    main()
