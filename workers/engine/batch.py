"""A step's work as tensors' contents: all that a rank needs to know of turns."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from holdfast.tokens import pack_tokens, unpack_tokens
from holdfast.v1 import rank_pb2
from workers.kv import new_tokens
from workers.scheduling import Turn, Work


@dataclass(slots=True)
class Batch:
    """What a step computes: the turns' shares, one after another."""

    rows: list[int] = field(default_factory=list)
    """Rows of the page tables, one a turn."""
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    tokens: array[int] = field(default_factory=new_tokens)
    """One that is in flight is ``-1 - i``: the ``i``-th that was chosen last, on the device."""
    logit_rows: list[int] = field(default_factory=list)
    """The tokens whose logits are wanted: first those that sample, then those that score input tokens."""

    @classmethod
    def of(cls, work: list[Work], in_flight: Sequence[Turn] = ()) -> Batch:
        """The batch of a planned step. ``in_flight``: the turns that the last chosen tokens belong to, in order."""
        batch = cls([w.row for w in work], [w.start for w in work], [w.count for w in work])
        places = {turn: -1 - i for i, turn in enumerate(in_flight)}
        if sum(batch.counts) == len(work) and not any([w.scored for w in work]):
            # As most steps are: one token of each turn.
            tokens = [places[w.turn] if w.turn.in_flight else w.turn.tokens[w.start] for w in work]
            batch.tokens = new_tokens(tokens)
            batch.logit_rows = [i for i, w in enumerate(work) if w.samples]
            return batch
        for w in work:
            if w.turn.in_flight:
                batch.tokens.append(places[w.turn])
            else:
                batch.tokens += w.turn.tokens[w.start : w.start + w.num_known]
                if w.draft is not None:
                    batch.tokens += w.draft.tokens
        end, scored, logit_rows = 0, [], batch.logit_rows
        for w in work:
            end += w.count
            logit_rows += range(end - w.num_samples, end)
            scored += [end - w.count - w.start + p for p in w.scored]
        logit_rows += scored
        return batch

    @classmethod
    def from_message(cls, message: rank_pb2.Batch) -> Batch:
        """A leader's batch, as it arrives in an entry of the step log."""
        return cls(
            unpack_tokens(message.rows).tolist(),
            unpack_tokens(message.starts).tolist(),
            unpack_tokens(message.counts).tolist(),
            unpack_tokens(message.tokens),
            unpack_tokens(message.logit_rows).tolist(),
        )

    def message(self) -> rank_pb2.Batch:
        """The batch for an entry of the step log."""
        return rank_pb2.Batch(
            rows=pack_tokens(array("i", self.rows)),
            starts=pack_tokens(array("i", self.starts)),
            counts=pack_tokens(array("i", self.counts)),
            tokens=pack_tokens(self.tokens),
            logit_rows=pack_tokens(array("i", self.logit_rows)),
        )
