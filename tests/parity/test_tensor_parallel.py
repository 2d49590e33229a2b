"""Ranks in threads over real gloo: together, their shards compute the whole model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from holdfast.errors import UnsupportedModel
from tests.parity.checkpoints import CHECKPOINTS, make_checkpoint
from tests.parity.test_logits import CPU, PagedModel
from workers.engine.collectives import Collectives
from workers.models import load_decoder, read_config
from workers.models.parallel import Shard

EVEN = {"num_attention_heads": 8, "vocab_size": 203, "hidden_size": 64}
"""8 heads on 2 KV heads: with 4 ranks each KV head is held twice. 203: the last rank's vocabulary is short."""

EXPERT_COUNTS = ["num_local_experts", "num_experts", "n_routed_experts"]


def on_ranks(size: int, work: Callable[[Collectives], torch.Tensor]) -> list[torch.Tensor]:
    """``work`` on each rank of a group; the results by rank."""
    store = dist.HashStore()
    results: dict[int, torch.Tensor] = {}
    failed: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            with torch.inference_mode():
                results[rank] = work(Collectives(store, Shard(rank, size), CPU, "127.0.0.1", 20))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if failed:
        raise failed[0]
    return [results[rank] for rank in range(size)]


EXPERTS = ["mixtral", "qwen2-moe", "qwen3-moe", "gpt-oss", "deepseek-v2", "deepseek-v3"]


def num_weights(part: object) -> int:
    """Elements of all tensors of nested dataclasses and lists."""
    if isinstance(part, torch.Tensor):
        return part.numel()
    if isinstance(part, list):
        return sum(map(num_weights, part))
    return sum(num_weights(getattr(part, f.name)) for f in fields(part)) if is_dataclass(part) else 0


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("name", "by_expert"), [*((n, False) for n in CHECKPOINTS), *((n, True) for n in EXPERTS)])
def test_fp32_logits_equal_transformers(name: str, by_expert: bool, size: int, tmp_path: Path) -> None:
    shape = EVEN | ({"num_key_value_heads": 8} if name.startswith("deepseek") else {})
    if name == "phi3-longrope":
        shape |= {"hidden_size": 128, "num_key_value_heads": 4}
    if by_expert:
        key = next(key for key in EXPERT_COUNTS if key in CHECKPOINTS[name][2])
        shape |= {key: 8}
    reference = make_checkpoint(name, tmp_path, **shape)
    ids = torch.randint(0, 199, (40,), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = reference(ids[None]).logits[0]

    def work(group: Collectives) -> torch.Tensor:
        config = read_config(tmp_path)
        decoder = load_decoder(
            tmp_path,
            config,
            device=CPU,
            dtype=torch.float32,
            context_len=256,
            group=group,
            expert_parallel=by_expert,
        )
        whole = sum(p.numel() for n, p in reference.named_parameters() if ".layers." in n)
        assert num_weights(decoder.weights.layers) < 0.8 * whole, "a rank holds its part"
        paged = PagedModel(decoder, 4)
        pieces = [ids[:17], ids[17:30], *ids[30:].split(1)]
        return torch.cat([paged.feed(piece.tolist()) for piece in pieces])

    got = on_ranks(size, work)[0]
    assert got.shape == expected.shape
    assert (got - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert torch.equal(got.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize(
    ("changes", "size", "field"),
    [
        ({"num_attention_heads": 6}, 4, "num_attention_heads"),
        ({"num_attention_heads": 12, "num_key_value_heads": 4}, 6, "num_key_value_heads"),
        ({"num_attention_heads": 4, "intermediate_size": 98}, 4, "intermediate_size"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_by_name(changes: dict, size: int, field: str, tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path, **{"hidden_size": 48, **changes})
    with pytest.raises(UnsupportedModel, match=f"^{field}: .* cannot be divided among {size} ranks"):
        read_config(tmp_path).shard(Shard(0, size))


def test_a_missing_peer_is_an_error_not_a_hang() -> None:
    def work(group: Collectives) -> torch.Tensor:
        if group.shard.rank == 1:
            return torch.zeros(1)
        return group.all_reduce(torch.zeros(1))

    with pytest.raises(RuntimeError):
        on_ranks(2, work)
