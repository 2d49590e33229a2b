"""Logits of every prefill chunk and decode step equal those of transformers, over page tables."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.parity.checkpoints import CHECKPOINTS, make_checkpoint
from workers.engine.memory import group_specs
from workers.kernels.backend import load_backend
from workers.kernels.cpu.tape import StepArrays
from workers.kernels.paged_attention import plan_attention
from workers.kv import SessionCache
from workers.kv.slot import new_tokens
from workers.models import Decoder, ForwardBatch, GroupBatch, KVPool, load_decoder, read_config
from workers.models.taped import TapedDecoder

CPU = torch.device("cpu")
KERNELS = ["torch_native", "cpu"]
PAGED = [(1, None), (4, 7), (16, 1), (64, 16)]
"""Page size, and the chunks of a prefill (None: one)."""


class PagedModel:
    """A decoder driven through the real KV core, one sequence, no scheduler."""

    def __init__(self, decoder: Decoder, page_size: int) -> None:
        self.decoder, self.page_size = decoder, page_size
        model = decoder.config
        num_pages = [256 // page_size + 3] * len(model.kv_groups)
        self.cache = SessionCache(group_specs(model, num_pages), page_size, max_slots=4)
        self.kv = KVPool(model, num_pages, page_size, decoder.dtype, decoder.device)
        self.tokens = new_tokens()
        tape = decoder._kernels.tape
        self.rows = [torch.zeros(1, 256 // page_size + 1, dtype=torch.int32) for _ in num_pages]
        self.taped = TapedDecoder(decoder, tape, self.kv, self.rows) if tape is not None else None
        # Take a few pages first, so that the table is not simply 0, 1, 2, ...
        self.cache.open("other")
        self.cache.resume("other", "t", new_tokens([1, 2]), 0)
        self.cache.extend("other", 1)
        self.cache.open("s")

    def feed(self, tokens: list[int]) -> torch.Tensor:
        """Compute ``tokens`` after what is there; logits ``[len(tokens), vocab]``."""
        self.tokens.extend(tokens)
        start = self.cache.resume("s", "turn", self.tokens, 0)
        self.cache.extend("s", len(tokens))
        slot, size = self.cache.slots["s"], self.page_size
        if self.taped is not None:
            for row, table in zip(self.rows, slot.tables, strict=True):
                row[0, : len(table.pages)] = torch.tensor(table.pages)
            zero, length = new_tokens([0]), new_tokens([len(tokens)])
            places = new_tokens(range(len(tokens)))
            logits = self.taped.forward(StepArrays(new_tokens(tokens), zero, new_tokens([start]), length, places))
            self.cache.commit({"s": new_tokens(tokens)})
            return logits
        positions = torch.arange(start, start + len(tokens))
        groups = []
        for group, table, heads in zip(self.cache.groups, slot.tables, self.decoder.config.head_shapes, strict=True):
            pages = torch.tensor(table.pages)
            plan = plan_attention(
                pages[None].to(torch.int32),
                [len(tokens)],
                [start + len(tokens)],
                size,
                heads=heads,
                dtype=self.decoder.dtype,
                window=group.window,
            )
            groups.append(GroupBatch(pages[positions // size], plan))
        batch = ForwardBatch(torch.tensor(tokens), positions, positions % size, groups, torch.arange(len(tokens)))
        with torch.inference_mode():
            logits = self.decoder.forward(batch, self.kv)
        self.cache.commit({"s": new_tokens(tokens)})
        return logits


@pytest.fixture(scope="module", params=CHECKPOINTS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp(request.param)
    return folder, make_checkpoint(request.param, folder)


def load(folder: Path, dtype: torch.dtype = torch.float32, kernels: str = "torch_native") -> Decoder:
    config, backend = read_config(folder), load_backend(kernels, CPU, dtype=dtype, num_threads=2)
    return load_decoder(folder, config, device=CPU, dtype=dtype, context_len=256, kernels=backend)


@pytest.mark.parametrize(("page_size", "chunk"), PAGED, ids=lambda n: str(n or "all"))
@pytest.mark.parametrize("kernels", KERNELS)
def test_fp32_logits_of_prefill_and_decode(checkpoint, kernels: str, page_size: int, chunk: int | None) -> None:
    folder, reference = checkpoint
    decoder = load(folder, kernels=kernels)
    for prompt_len in (3, 90):
        ids = torch.randint(0, 199, (prompt_len + 12,), generator=torch.Generator().manual_seed(prompt_len))
        with torch.no_grad():
            expected = reference(ids[None]).logits[0]
        paged, size = PagedModel(decoder, page_size), chunk or prompt_len
        pieces = [ids[i : min(i + size, prompt_len)] for i in range(0, prompt_len, size)]
        pieces += [ids[i : i + 1] for i in range(prompt_len, len(ids))]
        got = torch.cat([paged.feed(piece.tolist()) for piece in pieces])
        assert (got - expected).abs().max() <= 1e-4 * expected.abs().max()
        assert torch.equal(got.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("kernels", KERNELS)
def test_bf16_greedy_tokens_where_the_margin_is_clear(checkpoint, kernels: str, page_size: int) -> None:
    folder, reference = checkpoint
    exact, decoder = load(folder), load(folder, torch.bfloat16, kernels)
    ids = torch.randint(0, 199, (40,), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = reference.to(torch.bfloat16)(ids[None]).logits[0].float()
    reference.to(torch.float32)
    got = PagedModel(decoder, page_size).feed(ids.tolist())
    # The noise of bf16 itself, seen as the distance of either to the fp32 logits.
    precise = PagedModel(exact, page_size).feed(ids.tolist())
    # By position: a token that routes to another expert is far off, and the others are not.
    noise = torch.maximum((expected - precise).abs().amax(-1), (got - precise).abs().amax(-1))
    top = expected.topk(2, dim=-1).values
    clear = (top[:, 0] - top[:, 1]) > 2 * noise
    assert clear.sum() >= 5, "the test compares something"
    assert torch.equal(got.argmax(-1)[clear], expected.argmax(-1)[clear])


def test_sharded_checkpoint_equals_single(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path / "one")
    make_checkpoint("llama", tmp_path / "many", max_shard_size="60KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    ids = [5, 9, 11, 3]
    one, many = (PagedModel(load(tmp_path / n), 4).feed(ids) for n in ("one", "many"))
    assert torch.equal(one, many)


def test_fp16_loads_and_computes(tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path)
    exact = PagedModel(load(tmp_path), 4).feed([5, 9, 11, 3])
    half = PagedModel(load(tmp_path, torch.float16), 4).feed([5, 9, 11, 3])
    assert (exact - half).abs().max() < 0.05 * exact.abs().max()
