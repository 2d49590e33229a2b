"""A step's results as its turns receive them: new tokens, what became of drafts, ends; and what is told of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from holdfast.errors import HoldfastError, InvalidRequest
from workers.engine.choice import StepResult
from workers.engine.drafts import TurnDrafts
from workers.engine.messages import TurnUpdate
from workers.engine.outputs import Outputs
from workers.kv import Outcome
from workers.scheduling import Finish, Step, Turn

End: TypeAlias = tuple[Outcome, Finish | HoldfastError]
"""How a turn ends."""


class Receiver:
    """Gives results to turns, and keeps their updates until they are taken. For the step loop's thread."""

    def __init__(self, outputs: Outputs, drafts: TurnDrafts) -> None:
        self._outputs, self._drafts = outputs, drafts
        self._updates: dict[str, TurnUpdate] = {}

    def receive(self, step: Step, result: StepResult) -> tuple[int, list[tuple[Turn, End]]]:
        """The next tokens of a step's turns. Returns how many, and the turns that end: those get nothing beyond."""
        num_tokens = 0
        ends: list[tuple[Turn, End]] = []
        for work in step.work:  # for every turn in each step: what is called here is what a step costs
            turn, draft = work.turn, work.draft
            if turn.ended:
                continue
            if work.scored:
                self.update_of(turn).input_logprobs += result.input_logprobs[turn.turn_id]
            if not work.samples:
                continue
            if not turn.params.max_tokens:  # only its input is scored
                ends.append((turn, (Outcome.COMPLETED, Finish("length"))))
                continue
            samples = result.tokens[turn.turn_id]
            num_accepted = draft.accepted(samples) if draft is not None else 0
            length = len(turn.tokens)
            end = self._append(turn, samples[: num_accepted + 1])
            num_received = len(turn.tokens) - length
            if draft is not None or len(turn.tokens) >= turn.look_at:
                self._drafts.receive(work, num_received, num_accepted)
            update = self.update_of(turn)
            update.tokens += samples[:num_received] if draft is not None else samples
            if turn.turn_id in result.logprobs:
                update.logprobs += result.logprobs[turn.turn_id][:num_received]
            update.drafts = turn.drafts
            num_tokens += num_received
            if end is not None:
                ends.append((turn, end))
        return num_tokens, ends

    def _append(self, turn: Turn, tokens: Sequence[int]) -> End | None:
        """Give a turn tokens, up to the first that ends it. Returns how it ends, if it does."""
        try:
            finish = self._outputs.receive(turn, tokens)
        except InvalidRequest as error:
            return Outcome.ABORTED, error
        return (Outcome.COMPLETED, finish) if finish is not None else None

    def update_of(self, turn: Turn) -> TurnUpdate:
        """What is told of a turn next."""
        update = self._updates.get(turn.turn_id)
        if update is None:
            update = self._updates[turn.turn_id] = TurnUpdate(turn.turn_id, [], [], [], turn.cached_len)
        return update

    def add(self, updates: Mapping[str, TurnUpdate]) -> None:
        """Updates of turns that were never admitted, by turn id."""
        self._updates.update(updates)

    def take(self) -> list[TurnUpdate]:
        """The updates that tell something, which are new from now on."""
        updates, self._updates = self._updates.values(), {}
        return [u for u in updates if u.tokens or u.input_logprobs or u.finish or u.error or u.needs_history]
