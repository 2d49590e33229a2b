"""Law L14 on a CPU: a token's logits have the same bits alone, in a batch and in any chunks, for every family."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest
import torch

from tests.parity.checkpoints import CHECKPOINTS, make_checkpoint
from workers.kernels.backend import load_backend
from workers.kernels.cpu.tape import StepArrays
from workers.models import KVPool, load_decoder, read_config
from workers.models.taped import TapedDecoder

CPU = torch.device("cpu")
LENGTH, NUM_PAGES, SESSIONS = 100, 255, 3


class Model:
    """A decoder over page tables that are full from the start: any step can be computed, in any order."""

    def __init__(self, folder: Path, dtype: torch.dtype, page_size: int, **options: str) -> None:
        config = read_config(folder)
        kernels = load_backend("cpu", CPU, dtype=dtype, num_threads=2, **options)
        assert kernels.tape is not None
        decoder = load_decoder(folder, config, device=CPU, dtype=dtype, context_len=256, kernels=kernels)
        columns = -(-256 // page_size)
        pages = torch.randperm(NUM_PAGES, generator=torch.Generator().manual_seed(3)).to(torch.int32)
        tables = [
            pages[: SESSIONS * min(columns, NUM_PAGES // SESSIONS)].view(SESSIONS, -1).contiguous()
            for _ in config.kv_groups
        ]
        num_pages = [NUM_PAGES] * len(tables)
        self.kv = KVPool(decoder.config, num_pages, page_size, dtype, CPU, decoder.kv_scales)
        self._taped = TapedDecoder(decoder, kernels.tape, self.kv, tables)

    def step(self, *shares: tuple[int, int, list[int]]) -> torch.Tensor:
        """The logits of all tokens of sessions' ``(row, start, tokens)``."""
        rows, starts, tokens = zip(*shares, strict=True)
        together = array("i", [token for share in tokens for token in share])
        counts = array("i", map(len, tokens))
        places = array("i", range(len(together)))
        return self._taped.forward(StepArrays(together, array("i", rows), array("i", starts), counts, places))


def tokens(seed: int) -> list[int]:
    return torch.randint(0, 199, (LENGTH,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", CHECKPOINTS)
def test_a_token_has_the_same_bits_alone_in_a_batch_and_in_chunks(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    make_checkpoint(family, tmp_path)
    model, mine, others = Model(tmp_path, dtype, 4), tokens(1), tokens(2)
    whole = model.step((0, 0, mine))
    alone = torch.cat([model.step((1, i, mine[i : i + 1])) for i in range(LENGTH)])
    assert torch.equal(whole, alone)
    model.step((2, 0, others[:37]))
    chunks = [
        model.step((2, 37, others[37:40]), (0, 0, mine[:33]))[3:],
        model.step((0, 33, mine[33:41]), (2, 40, others[40:41]))[:8],
        model.step((2, 41, others[41:90]), (0, 41, mine[41:]))[49:],
    ]
    assert torch.equal(whole, torch.cat(chunks))
    assert torch.equal(whole, Model(tmp_path, dtype, 16).step((0, 0, mine))), "whatever the size of pages"


def test_int8_weights_are_near_those_of_the_checkpoint(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    exact = Model(tmp_path, torch.float32, 16).step((0, 0, tokens(1)))
    rounded = Model(tmp_path, torch.float32, 16, quantization="int8").step((0, 0, tokens(1)))
    error = (exact - rounded).norm() / exact.norm()
    assert 0 < error < 0.03
