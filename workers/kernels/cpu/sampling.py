"""The choice of tokens, as ``sampling.h`` has it."""

from __future__ import annotations

import torch
from torch import Tensor

from workers.kernels.cpu.tape import Tape


class CpuSampling:
    """``kernels.sampling.Sampling`` with a tape's threads. Its logarithms may differ in the last of 53 bits."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape  # whose threads live as long

    def mask(self, logits: Tensor, rows: Tensor, words: Tensor) -> None:
        """See ``Sampling``."""
        _check(logits, torch.float32)
        _check(rows, torch.int32)
        _check(words, torch.int32)
        assert 32 * words.shape[1] >= logits.shape[1]
        self._tape.library.holdfast_mask(
            self._tape.context, rows.data_ptr(), len(rows), words.data_ptr(), words.shape[1], logits.shape[1],
            logits.data_ptr(),
        )  # fmt: skip

    def likeliest(self, logits: Tensor) -> Tensor:
        """See ``Sampling``."""
        return self._choose(logits, None, None)

    def draw(self, logits: Tensor, temperature: Tensor, keys: Tensor) -> Tensor:
        """See ``Sampling``."""
        _check(temperature, torch.float32)
        _check(keys, torch.int32)
        return self._choose(logits, temperature.data_ptr(), keys.data_ptr())

    def _choose(self, logits: Tensor, temperature: int | None, keys: int | None) -> Tensor:
        _check(logits, torch.float32)
        num_rows, vocab_size = logits.shape
        tokens = torch.empty(num_rows, dtype=torch.int64)
        self._tape.library.holdfast_choose(
            self._tape.context, temperature, keys, num_rows, vocab_size, logits.data_ptr(), tokens.data_ptr()
        )
        return tokens


def _check(tensor: Tensor, dtype: torch.dtype) -> None:
    assert tensor.dtype == dtype and tensor.is_contiguous(), (tensor.dtype, tensor.stride())
