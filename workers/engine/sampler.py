"""From logits to tokens. A row depends only on its own logits, history, seed and position.

The noise is a counter-based function of (seed, position, token id). There is no generator state to
save, send or lose, and a turn continues after a failover as it would have without one. A token is
drawn with the Gumbel-max trick: ``argmax(logits / temperature + gumbel)`` over the filtered tokens.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.scheduling import SamplingParams


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """One turn that samples a token. ``tokens`` is its whole sequence so far."""

    params: SamplingParams
    tokens: Sequence[int]
    prompt_len: int
    banned: Sequence[int] = ()
    """Token ids that may not be chosen."""
    mask: bytes | None = None
    """The token ids that a grammar allows, a bit each, lowest first. Some of them is not banned."""


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


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """One token a row, int64 ``[rows]``, from fp32 ``logits [rows, vocab]``, which is changed in place."""
    for i, row in enumerate(rows):
        if row.params.logit_bias:
            tokens, biases = zip(*row.params.logit_bias, strict=True)
            logits[i, list(tokens)] += torch.tensor(biases, device=logits.device)
        if row.params.penalized:
            _penalize(logits[i], row)
        if row.banned:
            logits[i, list(row.banned)] = -torch.inf
    _mask(logits, rows)
    drawn = [i for i, row in enumerate(rows) if row.params.temperature > 0]
    if drawn:
        picked = logits[drawn]
        picked /= torch.tensor([[rows[i].params.temperature] for i in drawn], device=logits.device)
        _filter(picked, [rows[i].params for i in drawn])
        keys = [(rows[i].params.seed, len(rows[i].tokens)) for i in drawn]
        logits[drawn] = picked + gumbel_noise(keys, logits.shape[-1], logits.device)
    return logits.argmax(dim=-1)


def logprobs_of(
    logits: Tensor, chosen: Sequence[int], num_top: Sequence[int], wanted: Sequence[tuple[int, ...]]
) -> list[TokenLogprobs]:
    """Logprobs of ``chosen``, of the ``num_top`` likeliest tokens and of ``wanted``, a row each of ``logits``."""
    log_probs = logits.log_softmax(dim=-1)
    of_chosen = log_probs.gather(1, torch.tensor(chosen, device=logits.device)[:, None])
    picked, ranks = of_chosen[:, 0].tolist(), (1 + (log_probs > of_chosen).sum(dim=-1)).tolist()
    most = max(num_top)
    values, ids = (t.tolist() for t in log_probs.topk(most, dim=-1)) if most else ([], [])
    return [
        TokenLogprobs(
            token,
            picked[i],
            tuple(zip(ids[i][:top], values[i][:top], strict=True)) if top else (),
            tuple(zip(others, log_probs[i, list(others)].tolist(), strict=True)) if others else (),
            ranks[i],
        )
        for i, (token, top, others) in enumerate(zip(chosen, num_top, wanted, strict=True))
    ]


def gumbel_noise(keys: Sequence[tuple[int, int]], vocab_size: int, device: torch.device) -> Tensor:
    """Standard Gumbel noise fp32 ``[keys, vocab_size]``, a function of each key ``(seed, position)``."""
    pairs = [_mixing_keys(seed, position) for seed, position in keys]
    first, second = (torch.tensor([[p[i]] for p in pairs], device=device) for i in (0, 1))
    bits = torch.arange(vocab_size, device=device)[None, :] * 0x9E3779B9
    bits = _mix(_mix((bits + first) & 0xFFFFFFFF) ^ second)
    uniform = (bits.double() + 0.5) / 2.0**32
    return -(-uniform.log()).log().float()


def _mixing_keys(seed: int, position: int) -> tuple[int, int]:
    digest = hashlib.blake2b(f"{seed}/{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def _mix(x: Tensor) -> Tensor:
    """A bijective 32-bit mixer (Wellons' lowbias32) on int64 tensors that hold 32-bit values."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & 0xFFFFFFFF
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def _mask(logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    masks = {i: row.mask for i, row in enumerate(rows) if row.mask is not None}
    if masks:
        packed = torch.frombuffer(bytearray(b"".join(masks.values())), dtype=torch.uint8).to(logits.device)
        bits = packed.view(len(masks), -1, 1) >> torch.arange(8, dtype=torch.uint8, device=logits.device) & 1
        allowed = bits.flatten(1)[:, : logits.shape[-1]].bool()
        logits[list(masks)] = logits[list(masks)].masked_fill(~allowed, -torch.inf)


def _penalize(logits: Tensor, row: SamplingRow) -> None:
    p, device, vocab_size = row.params, logits.device, logits.shape[-1]
    # Copied as bytes: converting a long session's tokens to a list would cost more than the step.
    tokens = torch.frombuffer(array("i", row.tokens), dtype=torch.int32).to(device, torch.int64)
    if p.repetition_penalty != 1.0:
        seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        seen[tokens] = True
        penalized = torch.where(logits > 0, logits / p.repetition_penalty, logits * p.repetition_penalty)
        logits.copy_(torch.where(seen, penalized, logits))
    if p.presence_penalty or p.frequency_penalty:
        counts = torch.zeros(vocab_size, dtype=torch.int64, device=device)
        output = tokens[row.prompt_len :]
        counts.index_add_(0, output, torch.ones_like(output))
        logits -= torch.where(counts > 0, p.presence_penalty + p.frequency_penalty * counts.float(), 0.0)


def _filter(logits: Tensor, params: Sequence[SamplingParams]) -> None:
    """Set to -inf what top-k, top-p and min-p leave out; each filter looks at what the one before left."""
    device, vocab_size = logits.device, logits.shape[-1]
    if any(p.top_k or p.top_p < 1.0 for p in params):
        ordered, order = logits.sort(dim=-1, descending=True)
        top_k = torch.tensor([[p.top_k or vocab_size] for p in params], device=device)
        dropped = torch.arange(vocab_size, device=device)[None, :] >= top_k
        ordered = ordered.masked_fill(dropped, -torch.inf)
        top_p = torch.tensor([[p.top_p] for p in params], device=device)
        probs = ordered.softmax(dim=-1)
        # A token stays if those before it have not reached top_p yet. The first always does, also where
        # top_p is nothing in fp32.
        dropped[:, 1:] |= ((probs.cumsum(dim=-1) - probs >= top_p) & (top_p < 1.0))[:, 1:]
        logits.scatter_(1, order, ordered.masked_fill(dropped, -torch.inf))
    if any(p.min_p > 0.0 for p in params):
        min_p = torch.tensor([[p.min_p] for p in params], device=device)
        floor = logits.amax(dim=-1, keepdim=True) + min_p.log()
        logits.masked_fill_(logits < floor, -torch.inf)
