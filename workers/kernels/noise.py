"""The noise that chooses a token: a counter-based function of (seed, position, token id), added to its logit.

There is no generator state to save, send or lose. With standard Gumbel noise, the argmax of ``logits / temperature +
noise`` is a sample of the softmax.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor


def mixing_keys(places: Sequence[tuple[int, int]]) -> array[int]:
    """Two 32-bit keys for each ``(seed, position)``."""
    return array("i", b"".join([hashlib.blake2b(b"%d/%d" % place, digest_size=8).digest() for place in places]))


def gumbel_noise(keys: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise fp32 ``[rows, vocab_size]``."""
    first, second = (keys.view(-1, 2).long() & 0xFFFFFFFF).split(1, dim=1)
    bits = torch.arange(vocab_size, device=keys.device).unsqueeze(0) * 0x9E3779B9
    bits = _mix(_mix((bits + first) & 0xFFFFFFFF) ^ second)
    uniform = (bits.double() + 0.5) / 2.0**32
    return -(-uniform.log()).log().float()


def _mix(x: Tensor) -> Tensor:
    """A bijective 32-bit mixer (Wellons' lowbias32) on int64 tensors that hold 32-bit values."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & 0xFFFFFFFF
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)
