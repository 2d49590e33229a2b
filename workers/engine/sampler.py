"""From logits to tokens, on the device. A row depends only on its own logits, history, seed and position.

A token is drawn with the Gumbel-max trick: ``argmax(logits / temperature + gumbel)`` over the filtered tokens. A turn
continues after a failover as it would have without one: see ``kernels.noise``.

Parameters go to the device in one copy for each of what there is in a step: biases, penalties, grammars' masks, draws.
Nothing comes back: the host does not wait.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from workers.engine.penalties import PenaltyCounts, penalties_of
from workers.kernels.noise import mixing_keys
from workers.kernels.sampling import TORCH_SAMPLING, Sampling
from workers.kernels.upload import upload_parts
from workers.scheduling import SamplingParams, Turn

NO_TOKENS = array("i")


@dataclass(slots=True)
class Restrictions:
    """What some rows may not choose, by row."""

    banned: dict[int, Collection[int]] = field(default_factory=dict)
    """Token ids that may not be chosen."""
    masks: dict[int, bytes] = field(default_factory=dict)
    """The token ids that a grammar allows, a bit each, lowest first. Some of them is not banned."""


@dataclass(slots=True)
class Places:
    """Where tokens are chosen, a row each: after a turn's tokens, and after each token of its draft."""

    turns: list[Turn] = field(default_factory=list)
    num_drafted: list[int] = field(default_factory=list)
    """By row, how many of the draft's tokens come before it. Default: none anywhere."""
    drafts: dict[Turn, array[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.num_drafted = self.num_drafted or [0] * len(self.turns)

    def __len__(self) -> int:
        return len(self.turns)

    @property
    def params_of_turns(self) -> list[SamplingParams]:
        """Each turn's once, in no order: a turn with a draft has many rows."""
        return [turn.params for turn in set(self.turns)]

    def add(self, turn: Turn, draft: array[int] | None) -> None:
        """A turn's places, one after another."""
        if draft is None:
            self.turns.append(turn)
            self.num_drafted.append(0)
            return
        self.turns += [turn] * (len(draft) + 1)
        self.num_drafted += range(len(draft) + 1)
        self.drafts[turn] = draft

    def drafted(self, row: int) -> array[int]:
        """The draft's tokens that come before the row's."""
        count = self.num_drafted[row]
        return self.drafts[self.turns[row]][:count] if count else NO_TOKENS

    def of(self, rows: Sequence[int]) -> Places:
        """Some of them."""
        return Places([self.turns[row] for row in rows], [self.num_drafted[row] for row in rows], self.drafts)


def sample(
    logits: Tensor,
    places: Places,
    restricted: Restrictions,
    counts: PenaltyCounts,
    sampling: Sampling = TORCH_SAMPLING,
) -> Tensor:
    """One token a place, int64 ``[places]``, from fp32 ``logits [places, vocab]``, which is changed in place."""
    of_turns = places.params_of_turns
    if not restricted.masks and not restricted.banned and all([p.is_plain for p in of_turns]):
        return sampling.likeliest(logits)
    if restricted.banned or any([p.logit_bias for p in of_turns]):
        _bias(logits, places, restricted.banned)
    if any([p.penalized for p in of_turns]):
        _penalize(logits, places, counts)
    if restricted.masks:
        _mask(logits, restricted.masks, sampling)
    if all([p.temperature > 0 for p in of_turns]):
        return _draw(logits, places, sampling)
    tokens = sampling.likeliest(logits)
    if drawn := [i for i, turn in enumerate(places.turns) if turn.params.temperature > 0]:
        at = upload_parts([array("i", drawn)], logits.device)[0]
        tokens.index_put_((at,), _draw(logits.index_select(0, at), places.of(drawn), sampling))
    return tokens


def _bias(logits: Tensor, places: Places, banned: Mapping[int, Collection[int]]) -> None:
    rows, tokens, values = array("i"), array("i"), array("f")
    for i, turn in enumerate(places.turns):
        if turn.params.logit_bias or i in banned:
            # No place twice: sums have no order on a device.
            biases = dict(turn.params.logit_bias) | dict.fromkeys(banned.get(i, ()), float("-inf"))
            rows.extend([i] * len(biases))
            tokens.extend(biases.keys())
            values.extend(biases.values())
    at, tokens_at, added = upload_parts([rows, tokens, values], logits.device)
    logits.index_put_((at, tokens_at), added, accumulate=True)


def _penalize(logits: Tensor, places: Places, counts: PenaltyCounts) -> None:
    penalized = [i for i, turn in enumerate(places.turns) if turn.params.penalized]
    turns = [places.turns[i] for i in penalized]
    count_rows, new = counts.rows_of(turns)
    drafted = [(row, token) for row, i in enumerate(penalized) for token in places.drafted(i)]
    pairs = ([pair[i] for pair in drafted] for i in (0, 1))
    ints = [array("i", part) for part in (penalized, count_rows, *pairs)]
    ints += [new.rows, new.tokens, new.is_output]
    parts: list[array[Any]] = [*ints, penalties_of([turn.params for turn in turns])]
    rows, count_at, drafted_rows, drafted_tokens, *new_counts, penalties = upload_parts(parts, logits.device)
    counts.add(*new_counts)
    kept = counts.penalize(
        logits.index_select(0, rows), count_at, penalties.view(3, -1, 1), (drafted_rows, drafted_tokens)
    )
    logits.index_put_((rows,), kept)


def _mask(logits: Tensor, masks: Mapping[int, bytes], sampling: Sampling) -> None:
    width = -(-logits.shape[-1] // 32) * 4
    packed = array("i", b"".join([mask[:width].ljust(width, b"\0") for mask in masks.values()]))
    rows, words = upload_parts([array("i", masks), packed], logits.device)
    sampling.mask(logits, rows, words.view(len(masks), -1))


def _draw(logits: Tensor, places: Places, sampling: Sampling) -> Tensor:
    """A token for each of these places, all of which have a temperature."""
    params = [turn.params for turn in places.turns]
    rows = zip(places.turns, places.num_drafted, strict=True)
    keys = mixing_keys([(turn.params.seed, len(turn.tokens) + num_drafted) for turn, num_drafted in rows])
    parts: list[array[Any]] = [keys, array("f", [p.temperature for p in params])]
    if not any([p.filtered for p in places.params_of_turns]):
        keys_at, temperature = upload_parts(parts, logits.device)
        return sampling.draw(logits, temperature, keys_at)
    parts += [
        array("i", [p.top_k or logits.shape[-1] for p in params]),
        array("f", [p.top_p for p in params]),
        array("f", [p.min_p for p in params]),
    ]
    keys_at, temperature, *filters = upload_parts(parts, logits.device)
    logits = logits / temperature.unsqueeze(1)
    _filter(logits, params, *[part.unsqueeze(1) for part in filters])
    return sampling.draw(logits, torch.ones_like(temperature), keys_at)


def _filter(logits: Tensor, params: Sequence[SamplingParams], top_k: Tensor, top_p: Tensor, min_p: Tensor) -> None:
    """Set to -inf what top-k, top-p and min-p leave out; each filter looks at what the one before left."""
    vocab_size = logits.shape[-1]
    if any(p.top_k or p.top_p < 1.0 for p in params):
        ordered, order = logits.sort(dim=-1, descending=True)
        dropped = torch.arange(vocab_size, device=logits.device).unsqueeze(0) >= top_k
        ordered = ordered.masked_fill(dropped, -torch.inf)
        probs = ordered.softmax(dim=-1)
        # A token stays if those before it have not reached top_p yet. The first always does, also where
        # top_p is nothing in fp32.
        reached = (probs.cumsum(dim=-1) - probs >= top_p) & (top_p < 1.0)
        reached.select(1, 0).zero_()
        dropped |= reached
        logits.scatter_(1, order, ordered.masked_fill(dropped, -torch.inf))
    if any(p.min_p > 0.0 for p in params):
        floor = logits.amax(dim=-1, keepdim=True) + min_p.log()
        logits.masked_fill_(logits < floor, -torch.inf)
