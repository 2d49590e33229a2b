"""From logits to tokens, on the device. A row depends only on its own logits, history, seed and position.

A token is drawn with the Gumbel-max trick: ``argmax(logits / temperature + gumbel)`` over the filtered tokens. A turn
continues after a failover as it would have without one: see ``kernels.noise``.

A step's parameters go to the device in one copy, grammars' masks in another, and nothing comes back: the host does
not wait.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from workers.engine.penalties import PenaltyCounts, penalties_of
from workers.kernels.noise import AddNoise, add_torch_noise, mixing_keys
from workers.kernels.upload import upload_parts
from workers.scheduling import SamplingParams, Turn


@dataclass(slots=True)
class Restrictions:
    """What some rows may not choose, by row."""

    banned: dict[int, Collection[int]] = field(default_factory=dict)
    """Token ids that may not be chosen."""
    masks: dict[int, bytes] = field(default_factory=dict)
    """The token ids that a grammar allows, a bit each, lowest first. Some of them is not banned."""


class Place(NamedTuple):
    """Where a token is chosen: after a turn's tokens, and after these of its draft."""

    turn: Turn
    drafted: array[int] = array("i")

    @property
    def position(self) -> int:
        return len(self.turn.tokens) + len(self.drafted)


def sample(
    logits: Tensor,
    places: Sequence[Place],
    restricted: Restrictions,
    counts: PenaltyCounts,
    add_noise: AddNoise = add_torch_noise,
) -> Tensor:
    """One token a place, int64 ``[places]``, from fp32 ``logits [places, vocab]``, which is changed in place."""
    params = [place.turn.params for place in places]
    penalized = [i for i, p in enumerate(params) if p.penalized]
    drawn = [i for i, p in enumerate(params) if p.temperature > 0]
    biases = _biases(params, restricted.banned)
    if not (penalized or drawn or biases[0] or restricted.masks):
        return logits.argmax(dim=-1)
    count_rows, new = counts.rows_of([places[i].turn for i in penalized])
    drafted = [(row, token) for row, i in enumerate(penalized) for token in places[i].drafted]
    picked_params = [params[i] for i in drawn]
    keys = mixing_keys([(params[i].seed, places[i].position) for i in drawn])
    ints = [array("i", part) for part in (biases[0], biases[1], penalized, count_rows)]
    ints += [array("i", [pair[i] for pair in drafted]) for i in (0, 1)]
    ints += [new.rows, new.tokens, new.is_output, array("i", drawn), keys]
    ints.append(array("i", [p.top_k or logits.shape[-1] for p in picked_params]))
    floats = [array("f", biases[2]), penalties_of([params[i] for i in penalized])]
    floats += [
        array("f", [p.temperature for p in picked_params]),
        array("f", [p.top_p for p in picked_params]),
        array("f", [p.min_p for p in picked_params]),
    ]
    sent = upload_parts([*ints, *floats], logits.device)
    bias_rows, bias_tokens, at, count_at, drafted_rows, drafted_tokens, *new_counts, drawn_at, keys_at, top_k = sent[
        : len(ints)
    ]
    bias_values, penalties, temperature, top_p, min_p = sent[len(ints) :]

    if biases[0]:
        logits.index_put_((bias_rows, bias_tokens), bias_values, accumulate=True)
    if penalized:
        counts.add(*new_counts)
        kept = counts.penalize(
            logits.index_select(0, at), count_at, penalties.view(3, -1, 1), (drafted_rows, drafted_tokens)
        )
        logits.index_put_((at,), kept)
    if restricted.masks:
        _mask(logits, restricted.masks)
    if drawn:
        picked = logits.index_select(0, drawn_at) / temperature.unsqueeze(1)
        _filter(picked, picked_params, top_k.unsqueeze(1), top_p.unsqueeze(1), min_p.unsqueeze(1))
        add_noise(picked, keys_at)
        if len(drawn) == len(places):
            return picked.argmax(dim=-1)
        logits.index_put_((drawn_at,), picked)
    return logits.argmax(dim=-1)


def _biases(
    params: Sequence[SamplingParams], banned: Mapping[int, Collection[int]]
) -> tuple[list[int], list[int], list[float]]:
    """Rows, tokens, and what is added to their logits; no place twice, because sums have no order on a device."""
    rows: list[int] = []
    tokens: list[int] = []
    values: list[float] = []
    for i, p in enumerate(params):
        if p.logit_bias or i in banned:
            biases = dict(p.logit_bias) | dict.fromkeys(banned.get(i, ()), float("-inf"))
            rows += [i] * len(biases)
            tokens += biases.keys()
            values += biases.values()
    return rows, tokens, values


def _mask(logits: Tensor, masks: Mapping[int, bytes]) -> None:
    packed = array("i", b"".join([mask + bytes(-len(mask) % 4) for mask in masks.values()]))
    at, words = upload_parts([array("i", masks), packed], logits.device)
    bits = words.view(len(masks), -1, 1) >> torch.arange(32, dtype=torch.int32, device=logits.device) & 1
    forbidden = bits.flatten(1).narrow(1, 0, logits.shape[-1]) == 0
    if len(masks) == len(logits):
        logits.masked_fill_(forbidden, -torch.inf)
    else:
        logits.index_put_((at,), logits.index_select(0, at).masked_fill(forbidden, -torch.inf))


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
