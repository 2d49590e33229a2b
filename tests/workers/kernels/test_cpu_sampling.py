"""The choice of tokens by a CPU's kernels: torch's, token for token."""

from __future__ import annotations

import pytest
import torch

from workers.kernels.cpu.library import load_library
from workers.kernels.cpu.sampling import CpuSampling
from workers.kernels.cpu.tape import Tape
from workers.kernels.noise import mixing_keys
from workers.kernels.sampling import TORCH_SAMPLING


@pytest.fixture(scope="module")
def sampling() -> CpuSampling:
    library = load_library()
    if library is None:
        pytest.skip("no C++ compiler")
    return CpuSampling(Tape(library, torch.float32, 2))


def random_logits(rows: int, vocab_size: int, scale: float) -> torch.Tensor:
    logits = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * scale
    logits[::5, ::3] = -torch.inf  # as a grammar or a filter leaves them
    logits[-1] = -torch.inf
    return logits


VOCAB_SIZES = pytest.mark.parametrize("vocab_size", [1, 7, 64, 2048, 2050, 50_001])


@VOCAB_SIZES
@pytest.mark.parametrize("scale", [0.0, 1.0, 8.0, 1e4])
def test_a_draw_equals_the_reference(sampling: CpuSampling, vocab_size: int, scale: float) -> None:
    keys = torch.frombuffer(mixing_keys([(i, 5) for i in range(198)] + [(2**62, 9), (-3, 10**6)]), dtype=torch.int32)
    logits, temperature = random_logits(200, vocab_size, scale), torch.linspace(0.05, 2.0, 200)
    given = logits.clone()
    got = sampling.draw(logits, temperature, keys)
    assert torch.equal(logits, given), "it changes nothing"
    assert torch.equal(got, TORCH_SAMPLING.draw(given, temperature, keys))
    assert torch.equal(got[3:4], sampling.draw(logits[3:4], temperature[3:4], keys[6:8])), "alone or in a batch"


@pytest.mark.parametrize("temperature", [1e-42, 1e-38, 1e-6, 1e3, 1e38])
def test_a_draw_at_any_temperature_equals_the_reference(sampling: CpuSampling, temperature: float) -> None:
    keys = torch.frombuffer(mixing_keys([(i, 5) for i in range(50)]), dtype=torch.int32)
    logits, temperatures = random_logits(50, 2050, 8.0), torch.full((50,), temperature)
    expected = TORCH_SAMPLING.draw(logits.clone(), temperatures, keys)
    assert torch.equal(sampling.draw(logits, temperatures, keys), expected)


@VOCAB_SIZES
@pytest.mark.parametrize("scale", [0.0, 8.0])
def test_the_likeliest_is_the_first_of_equal_ones(sampling: CpuSampling, vocab_size: int, scale: float) -> None:
    logits = random_logits(9, vocab_size, scale).round()  # many are equal
    assert torch.equal(sampling.likeliest(logits), logits.argmax(dim=-1))


@VOCAB_SIZES
def test_a_mask_forbids_what_the_reference_does(sampling: CpuSampling, vocab_size: int) -> None:
    logits, generator = random_logits(6, vocab_size, 1.0), torch.Generator().manual_seed(1)
    for rows in ([0, 1, 2, 3, 4, 5], [4, 1]):
        words = torch.randint(-(2**31), 2**31, (len(rows), -(-vocab_size // 32)), generator=generator).int()
        words[0, 0], words[1] = -1, 0
        got, expected, at = logits.clone(), logits.clone(), torch.tensor(rows, dtype=torch.int32)
        sampling.mask(got, at, words)
        TORCH_SAMPLING.mask(expected, at, words)
        assert torch.equal(got, expected)


@pytest.mark.parametrize("place", [0, 17, 50, 99])
def test_nan_is_chosen_as_torch_does(sampling: CpuSampling, place: int) -> None:
    logits = torch.zeros(1, 100)
    logits[0, place] = logits[0, 99] = torch.nan
    drawn = sampling.draw(logits, torch.ones(1), torch.tensor([1, 2], dtype=torch.int32))
    assert drawn == sampling.likeliest(logits) == logits.argmax() == place
