"""The choice of tokens from logits: what a backend has to offer, and the torch implementation that defines it."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from workers.kernels.noise import gumbel_noise


class Sampling(Protocol):
    """On fp32 ``logits [rows, vocab]``. Of equal sums the first token is chosen."""

    def mask(self, logits: Tensor, rows: Tensor, words: Tensor) -> None:
        """Set tokens of ``rows`` to -inf in place: those without a bit in int32 ``words [len(rows), words]``, lowest
        first.
        """

    def likeliest(self, logits: Tensor) -> Tensor:
        """A token a row, int64 ``[rows]``."""

    def draw(self, logits: Tensor, temperature: Tensor, keys: Tensor) -> Tensor:
        """A sample of the softmax of ``logits / temperature`` a row, int64 ``[rows]``, by its noise (``noise``).

        ``temperature [rows]`` is fp32, ``keys [2 * rows]`` int32: ``noise.mixing_keys``.
        """


class TorchSampling:
    """See ``Sampling``."""

    def mask(self, logits: Tensor, rows: Tensor, words: Tensor) -> None:
        """See ``Sampling``."""
        bits = words.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32, device=logits.device) & 1
        forbidden = bits.flatten(1).narrow(1, 0, logits.shape[-1]) == 0
        if len(rows) == len(logits):
            logits.masked_fill_(forbidden, -torch.inf)
        else:
            logits.index_put_((rows,), logits.index_select(0, rows).masked_fill(forbidden, -torch.inf))

    def likeliest(self, logits: Tensor) -> Tensor:
        """See ``Sampling``."""
        return logits.argmax(dim=-1)

    def draw(self, logits: Tensor, temperature: Tensor, keys: Tensor) -> Tensor:
        """See ``Sampling``."""
        noise = gumbel_noise(keys, logits.shape[-1])
        return (logits / temperature.unsqueeze(1)).add_(noise).argmax(dim=-1)


TORCH_SAMPLING = TorchSampling()
