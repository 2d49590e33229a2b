"""The end of a step: the next tokens and the logprobs that are wanted, in one copy from the device."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from workers.engine.penalties import PenaltyCounts
from workers.engine.sampler import Places, Restrictions, sample
from workers.engine.stream import Result
from workers.kernels.sampling import TORCH_SAMPLING, Sampling
from workers.kernels.upload import Download, upload_parts
from workers.scheduling import Step, Turn, Work


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities under the model itself (before temperature, penalties and filters)."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    wanted: tuple[tuple[int, float], ...] = ()
    """Of ``SamplingParams.logprob_token_ids``."""
    rank: int = 1
    """1: no token is likelier."""


@dataclass(slots=True)
class StepResult:
    """A step's results by turn id."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    """The next one, and after a draft the one after each of its tokens, if the draft is right up to there."""
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    """Of ``tokens``."""
    input_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class InFlight:
    """A step that the device computes."""

    step: Step
    sampling: list[Turn]
    """The turns whose next tokens it chooses, in that order."""
    began: float
    log_index: int
    pending: Result[StepResult]


class Choice:
    """The wanted results of one step: what they are computed from, and where in one copy each lies.

    ``ended``: turns of ``work`` that have ended, and get nothing.
    """

    def __init__(self, work: Sequence[Work], ended: Sequence[bool], masks: Mapping[str, Sequence[bytes]]) -> None:
        self._logit_rows: list[int] = []
        self._places = Places()
        num_sampling, turns, logit_rows = 0, self._places.turns, self._logit_rows
        for w, over in zip(work, ended, strict=True):
            if not w.samples:
                continue
            first = num_sampling
            num_sampling += 1 if w.draft is None else 1 + len(w.draft.tokens)
            if not over:
                logit_rows += range(first, num_sampling)
                self._places.add(w.turn, w.draft.tokens if w.draft is not None else None)
        self._restricted = restrictions(self._places, masks)
        self._all_live = len(turns) == num_sampling
        self._scored: list[tuple[int, Work]] = []
        first = num_sampling
        for w, over in zip(work, ended, strict=True):
            if w.scored:
                if not over:
                    self._scored.append((first, w))
                first += len(w.scored)
        self._with_logprobs: list[int] = []
        if any([params.num_logprobs >= 0 for params in self._places.params_of_turns]):
            self._with_logprobs = [i for i, turn in enumerate(turns) if turn.params.num_logprobs >= 0]
        of_rows = [turns[i] for i in self._with_logprobs]
        of_rows += [w.turn for _, w in self._scored for _ in w.scored]
        self._row_turns = of_rows
        self._num_top = max((t.params.num_logprobs for t in of_rows), default=0)
        self._wanted = [(i, token) for i, t in enumerate(of_rows) for token in t.params.logprob_token_ids]

    def queue(
        self, logits: Tensor, counts: PenaltyCounts, sampling: Sampling = TORCH_SAMPLING
    ) -> tuple[Tensor, Tensor]:
        """Compute it on the device: the chosen tokens int64 ``[places]``, and all results int32 in one row.

        Without logprobs the tokens are the results: each call of torch's costs a step some microseconds.
        """
        log_probs = None
        if self._row_turns:
            # Before sampling, which changes the logits.
            rows = [self._logit_rows[i] for i in self._with_logprobs]
            rows += [first + i for first, w in self._scored for i in range(len(w.scored))]
            targets = array("i")
            for _, w in self._scored:
                targets += w.turn.tokens[w.scored.start + 1 : w.scored.stop + 1]
            columns = [array("i", [pair[i] for pair in self._wanted]) for i in (0, 1)]
            parts = [array("i", rows), array("i", self._with_logprobs), targets, *columns]
            at, with_logprobs, targets_at, wanted_rows, wanted_tokens = upload_parts(parts, logits.device)
            log_probs = logits.index_select(0, at).log_softmax(dim=-1)
        if not self._places.turns:
            chosen = torch.empty(0, dtype=torch.int64, device=logits.device)
        else:
            picked = logits
            if not self._all_live:
                picked = logits.index_select(0, upload_parts([array("i", self._logit_rows)], logits.device)[0])
            elif logits.shape[0] > len(self._places):
                picked = logits.narrow(0, 0, len(self._places))
            chosen = sample(picked, self._places, self._restricted, counts, sampling)
        if log_probs is None:
            return chosen, chosen
        tokens = torch.cat([chosen.index_select(0, with_logprobs), targets_at.long()])
        of_tokens = log_probs.gather(1, tokens.unsqueeze(1))
        ranks = 1 + (log_probs > of_tokens).sum(dim=-1)
        top = log_probs.topk(self._num_top, dim=-1)
        places = wanted_rows.long() * log_probs.shape[1] + wanted_tokens
        wanted = log_probs.flatten().index_select(0, places)
        results = [chosen.int(), of_tokens.view(torch.int32), ranks.int(), top.indices.int()]
        results += [top.values.view(torch.int32), wanted.view(torch.int32)]
        return chosen, torch.cat([part.flatten() for part in results])

    def read(self, results: Tensor) -> StepResult:
        """What ``queue`` computed, on the host."""
        num_rows, result = len(self._row_turns), StepResult()
        if not num_rows:
            self._give_tokens(results.tolist(), result)
            return result
        num_top = num_rows * self._num_top
        sizes = [len(self._places), num_rows, num_rows, num_top, num_top, len(self._wanted)]
        tokens, of_tokens, ranks, top_ids, top_values, of_wanted = results.split_with_sizes(sizes)
        turns, chosen = self._places.turns, tokens.tolist()
        self._give_tokens(chosen, result)
        targets = [chosen[i] for i in self._with_logprobs]
        for _, w in self._scored:
            targets += w.turn.tokens[w.scored.start + 1 : w.scored.stop + 1]
        ids = top_ids.view(num_rows, -1).tolist()
        values = top_values.view(torch.float32).view(num_rows, -1).tolist()
        wanted: list[list[tuple[int, float]]] = [[] for _ in range(num_rows)]
        for (i, token), value in zip(self._wanted, of_wanted.view(torch.float32).tolist(), strict=True):
            wanted[i].append((token, value))
        logprobs, ranked = of_tokens.view(torch.float32).tolist(), ranks.tolist()
        rows = iter(range(num_rows))

        def next_row() -> TokenLogprobs:
            i = next(rows)
            num = max(0, self._row_turns[i].params.num_logprobs)
            top = tuple(zip(ids[i][:num], values[i][:num], strict=True))
            return TokenLogprobs(targets[i], logprobs[i], top, tuple(wanted[i]), ranked[i])

        for i in self._with_logprobs:
            result.logprobs.setdefault(turns[i].turn_id, []).append(next_row())
        for _, w in self._scored:
            result.input_logprobs[w.turn.turn_id] = [next_row() for _ in w.scored]
        return result

    def _give_tokens(self, chosen: list[int], result: StepResult) -> None:
        turns, drafts = self._places.turns, self._places.drafts
        if not drafts:
            result.tokens = {turn.turn_id: [token] for turn, token in zip(turns, chosen, strict=True)}
            return
        at = 0
        while at < len(turns):
            end = at + 1 + len(drafts.get(turns[at], ()))
            result.tokens[turns[at].turn_id] = chosen[at:end]
            at = end


@dataclass(frozen=True, slots=True)
class PendingChoice:
    """A choice whose results are on their way. ``download``: what a stream has queued."""

    download: Result[tuple[Choice, Download]]

    def result(self) -> StepResult:
        choice, download = self.download.result()
        return choice.read(download.wait())


def restrictions(places: Places, masks: Mapping[str, Sequence[bytes]]) -> Restrictions:
    """What may not be chosen at these places. ``masks``: see ``TurnGrammars.masks``."""
    restricted = Restrictions()
    if not masks and not any([params.min_tokens for params in places.params_of_turns]):
        return restricted
    for i, (turn, num_drafted) in enumerate(zip(places.turns, places.num_drafted, strict=True)):
        if turn.turn_id in masks:
            restricted.masks[i] = masks[turn.turn_id][num_drafted]
        if turn.params.min_tokens and (banned := turn.banned_tokens(num_drafted)):
            restricted.banned[i] = banned
    for i in restricted.banned.keys() & restricted.masks.keys():
        allowed = int.from_bytes(restricted.masks[i], "little")
        if not allowed & ~sum(1 << token for token in restricted.banned[i]):
            del restricted.banned[i]  # the text is complete: nothing else can follow, before ``min_tokens`` or not
    return restricted
