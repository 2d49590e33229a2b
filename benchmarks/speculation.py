"""Tokens/s with drafts over without: an agent that quotes, an edit with its prediction, text that nobody can guess.

The engine alone, with the bundled model; both settings take turns, and figures are medians of the rounds' ratios. The
agent's answers are made to quote lines of the tool's output by a grammar, in both settings. The edit's prediction is
its output with words changed, added and left out, as a file is before it is edited. The floor is no speculation: 1.0.
What a second engine without drafts has is what these figures are exact to: it may be 0.98.
"""

from __future__ import annotations

import gc
import random
import re
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenizers import Tokenizer

from benchmarks.common import save
from workers.config import BUNDLED_MODEL, EngineConfig
from workers.engine.leader import Leader
from workers.engine.messages import Submission, TurnUpdate
from workers.kv.slot import new_tokens
from workers.scheduling import Draft, Grammar, SamplingParams, Turn

CONFIG = EngineConfig(max_total_tokens=65_536, max_running_requests=32, num_threads=2, overlap_schedule=False)
ROUNDS, BATCHES = 7, (1, 4, 16)
OUTPUT, TURNS, FREE_TURNS = 240, 4, 4
PROMPTS = ("def main(", "Return the list of", "class Reader:", "The function takes", "for name in", "import os\n")


@dataclass(frozen=True)
class Request:
    """One turn of a session."""

    session: str
    tokens: list[int]
    params: SamplingParams
    prediction: tuple[int, ...] = ()


class Engine:
    """A leader that is stepped here."""

    def __init__(self, **settings: Any) -> None:
        self.outputs: dict[str, list[int]] = {}
        self.leader = Leader(replace(CONFIG, **settings), self._take, self._fail)
        self.by_place: Counter[tuple[int, bool]] = Counter()
        self._accepted = Draft.accepted

    def _take(self, updates: list[TurnUpdate]) -> None:
        for update in updates:
            self.outputs.setdefault(update.turn_id, []).extend(update.tokens)

    def _fail(self, error: BaseException) -> None:
        raise error

    def run(self, requests: Sequence[Request], at_once: int) -> tuple[float, dict[str, list[int]]]:
        """Seconds until all are done, ``at_once`` of them at a time, and their outputs by session."""
        self.outputs.clear()
        compiled = [self.leader._outputs.compile(request.params) for request in requests]
        for future in compiled:
            if future is not None:
                future.result()
        began, num_submitted = time.perf_counter(), 0
        while num_submitted < len(requests) or self.leader.scheduler.turns:
            while num_submitted < len(requests) and len(self.leader.scheduler.turns) < at_once:
                self._submit(requests[num_submitted])
                num_submitted += 1
            self.leader.step()
        return time.perf_counter() - began, dict(self.outputs)

    def _submit(self, r: Request) -> None:
        submission = Submission(
            r.session, r.session, "", 1, new_tokens(r.tokens), len(r.tokens), r.params,
            prediction=new_tokens(r.prediction),
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


def count_places(engine: Engine) -> None:
    """Count each drafted token by its place in the draft, and whether it was accepted."""
    speculation = engine.leader.drafts.speculation
    assert speculation is not None
    receive = speculation.receive

    def counted(turn: Turn, draft: Draft | None, num_accepted: int) -> None:
        if draft is not None:
            engine.by_place.update((i, i < num_accepted) for i in range(len(draft.tokens)))
        receive(turn, draft, num_accepted)

    speculation.receive = counted  # type: ignore[method-assign]


class Agents:
    """Sessions whose turns bring a tool's output, of which the answer quotes lines between words of its own."""

    name, least = "agent that quotes tool output", 2.0

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def play(self, engine: Engine, batch: int, seed: int) -> float:
        rng = random.Random(seed)
        histories: dict[str, list[int]] = {f"agent-{i}": [] for i in range(batch)}
        total = 0.0
        for _ in range(TURNS):
            requests = [self._turn(rng, name, history) for name, history in histories.items()]
            seconds, outputs = engine.run(requests, batch)
            total += seconds
            histories = {r.session: r.tokens + outputs[r.session] for r in requests}
        return total

    def _turn(self, rng: random.Random, name: str, history: list[int]) -> Request:
        lines = [
            f"src/{rng.choice(['reader', 'parser', 'main', 'tests'])}_{rng.randint(1, 99)}.py:{rng.randint(1, 400)}: "
            f"{rng.choice(['error', 'warning'])}: name '{rng.choice(['value', 'items', 'result'])}' is not defined"
            for _ in range(6)
        ]
        quoted = [re.escape(line).replace("\\ ", " ").replace("\\'", "'") for line in rng.sample(lines, 3)]
        own = "[a-z ]{8,24}"
        grammar = Grammar("regex", f"{own}\\n{quoted[0]}\\n{own}\\n{quoted[1]}\\n{quoted[2]}\\n{own}", "bench")
        tokens = [*history, *self._tokenizer.encode("\nThe tool says:\n" + "\n".join(lines) + "\n").ids]
        return Request(name, tokens, SamplingParams(max_tokens=OUTPUT, grammar=grammar))


class Edits:
    """Files that come back with a few words changed; the request predicts them as they were."""

    name, least = "code edit with a prediction", 3.0

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._plain = tokenizer, Engine()
        self._requests: dict[tuple[int, int], list[Request]] = {}

    def play(self, engine: Engine, batch: int, seed: int) -> float:
        if (batch, seed) not in self._requests:
            self._requests[batch, seed] = self._make(batch, random.Random(seed))
        return engine.run(self._requests[batch, seed], batch)[0]

    def _make(self, batch: int, rng: random.Random) -> list[Request]:
        params = SamplingParams(max_tokens=OUTPUT, ignore_eos=True, temperature=0.7)
        requests = [
            Request(
                f"edit-{i}", self._tokenizer.encode(rng.choice(PROMPTS)).ids, replace(params, seed=rng.randrange(10**6))
            )
            for i in range(batch)
        ]
        _, outputs = self._plain.run(requests, batch)
        self._plain.forget()
        return [replace(r, prediction=tuple(self._before(rng, outputs[r.session]))) for r in requests]

    def _before(self, rng: random.Random, output: list[int]) -> list[int]:
        before = list(output)
        for at in sorted(rng.sample(range(20, OUTPUT - 20), 4), reverse=True):
            before[at : at + rng.randint(0, 6)] = rng.choices(range(100, 2000), k=rng.randint(0, 6))
        return before


class FreeText:
    """Sampled text: turns one after another, so that one that is done early makes room for the next."""

    least = 0.97

    def __init__(self, tokenizer: Tokenizer, temperature: float) -> None:
        self.name = f"free text at temperature {temperature:g}"
        self._tokenizer, self._temperature = tokenizer, temperature

    def play(self, engine: Engine, batch: int, seed: int) -> float:
        rng = random.Random(seed)
        params = SamplingParams(max_tokens=OUTPUT, ignore_eos=True, temperature=self._temperature)
        requests = []
        for i in range(FREE_TURNS * batch):
            tokens = self._tokenizer.encode(rng.choice(PROMPTS)).ids + rng.choices(range(100, 2000), k=3)
            requests.append(Request(f"free-{i}", tokens, replace(params, seed=rng.randrange(10**6))))
        return engine.run(requests, batch)[0]


def acceptance(engine: Engine) -> dict[str, float]:
    """The share of accepted tokens by their place in a draft."""
    figures = {}
    for first, last in ((0, 0), (1, 1), (2, 3), (4, 7), (8, 15)):
        places = range(first, last + 1)
        accepted, missed = (sum(engine.by_place[i, held] for i in places) for held in (True, False))
        if accepted + missed:
            figures[f"{first + 1} to {last + 1}"] = round(accepted / (accepted + missed), 2)
    return figures


def main() -> None:
    tokenizer = Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))
    workloads: list[Any] = [Agents(tokenizer), Edits(tokenizer), FreeText(tokenizer, 0.0), FreeText(tokenizer, 1.0)]
    figures: dict[str, Any] = {}
    for workload in workloads:
        rows: dict[str, Any] = {"goal": workload.least}
        for batch in BATCHES:
            engines = Engine(), Engine(speculative_algorithm="NGRAM"), Engine()
            drafting = engines[1]
            count_places(drafting)
            gc.collect()
            gc.freeze()  # as a rank does when it has started
            ratios, of_plain = list[float](), list[float]()
            for number in range(ROUNDS + 1):
                seconds = [workload.play(engine, batch, number) for engine in engines]
                for engine in engines:
                    engine.forget()
                if number:  # the first round warms up
                    ratios.append(seconds[0] / seconds[1])
                    of_plain.append(seconds[0] / seconds[2])
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
    save("speculation", figures)


if __name__ == "__main__":
    main()
