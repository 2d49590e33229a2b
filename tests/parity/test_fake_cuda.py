"""The forward pass of a GPU on fake tensors: nothing waits for the device, and nothing is on the wrong one.

Under ``FakeTensorMode`` a value that the host reads from the device raises, and so do tensors of two devices.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.parity.checkpoints import make_checkpoint
from tests.parity.heads import make_eagle3, make_mtp
from workers.engine import choice, decode_graphs, sampler
from workers.engine.batch import Batch
from workers.engine.decode_graphs import DecodeGraphs, sizes_up_to
from workers.engine.penalties import PenaltyCounts
from workers.kernels import attention_launch, elementwise_launch, experts_launch, products_launch
from workers.kernels.attention_launch import plan_triton_attention, plan_triton_decodes
from workers.kernels.backend import TORCH, Backend
from workers.kernels.elementwise_launch import TritonElementwise
from workers.kernels.experts_launch import TritonExperts
from workers.kernels.fp8 import FP8
from workers.kernels.products_launch import TritonProducts
from workers.kv.slot import new_tokens
from workers.models import Decoder, ForwardBatch, GroupBatch, KVPool, load_decoder, read_config
from workers.models.head_loader import load_head
from workers.models.heads import DraftHead, eagle3_config, mtp_config
from workers.scheduling import Draft, SamplingParams, Turn, Work

CUDA = torch.device("cuda", 0)
FAMILIES = ["llama", "mistral-window", "qwen2-window", "qwen3", "gemma2", "gemma3", "phi3", "olmo2"]
FAMILIES += ["mixtral", "gpt-oss", "qwen2-moe", "qwen3-moe", "deepseek-v2", "deepseek-v3"]
END = frozenset({2})
BATCHES = {"decode": ([1, 1, 1], [40, 3, 900]), "prefill": ([30], [30]), "mixed": ([1, 20, 1], [700, 25, 9])}


class Products(TorchDispatchMode):
    """Notes torch's own matrix products, whose order of summation may depend on the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "einsum"):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


class Launched:
    """In place of a kernel: notes its launches, whose tensors must all be on the GPU."""

    def __init__(self, kernel: Any, launches: list[str]) -> None:
        self.arg_names: list[str] = kernel.arg_names
        self._name, self._launches = kernel.fn.__name__, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert 1 <= len(grid) <= 3 and all(isinstance(size, int) and size > 0 for size in grid)

        def launch(*args: Any, **constants: Any) -> None:
            tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
            assert all(isinstance(t, FakeTensor) and t.device == CUDA for t in tensors)
            assert len(args) + sum(name in self.arg_names for name in constants) == len(self.arg_names)
            self._launches.append(self._name)

        return launch


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that were launched."""
    noted: list[str] = []
    for module in (attention_launch, elementwise_launch, experts_launch, products_launch):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Launched(getattr(module, name), noted))
    for module in (attention_launch, choice, decode_graphs, sampler):
        monkeypatch.setattr(module, "upload_parts", parts_on_device)
    return noted


def parts_on_device(parts: Sequence[Any], device: torch.device) -> list[torch.Tensor]:
    dtypes = {"i": torch.int32, "f": torch.float32}
    return [torch.empty(len(part), dtype=dtypes[part.typecode], device=device) for part in parts]


def fake(weights: Any) -> Any:
    """The same weights, on a GPU that is not there."""
    if isinstance(weights, torch.Tensor):
        return torch.empty(weights.shape, dtype=torch.bfloat16, device=CUDA)
    if isinstance(weights, list):
        return [fake(item) for item in weights]
    if dataclasses.is_dataclass(weights) and not isinstance(weights, type):
        return dataclasses.replace(
            weights, **{f.name: fake(getattr(weights, f.name)) for f in dataclasses.fields(weights)}
        )
    return weights


def on_gpu(real: Decoder, ops: TritonElementwise) -> Decoder:
    decoder = copy.copy(real)
    decoder.device, decoder._ops = CUDA, ops
    decoder._kernels = Backend(plan_triton_attention, ops, TritonExperts(), TritonProducts())
    decoder.weights, decoder._tables = fake(real.weights), fake(real._tables)
    decoder._embedding_scale = fake(real._embedding_scale)
    if isinstance(decoder, DraftHead):
        vars(decoder).update(
            {name: fake(value) for name, value in vars(real).items() if isinstance(value, torch.Tensor)}
        )
    return decoder


def forward(decoder: Decoder, kv: KVPool, query_lens: list[int], context_lens: list[int]) -> torch.Tensor:
    num_tokens, size = sum(query_lens), kv.page_size

    def ints(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device=CUDA)

    tables = ints(len(query_lens), -(-max(context_lens) // size), dtype=torch.int32)
    groups = [
        GroupBatch(
            ints(num_tokens),
            plan_triton_attention(
                tables, query_lens, context_lens, size, heads=heads, dtype=decoder.dtype, window=group.window
            ),
        )
        for group, heads in zip(decoder.config.kv_groups, decoder.config.head_shapes, strict=True)
    ]
    batch = ForwardBatch(ints(num_tokens), ints(num_tokens), ints(num_tokens), groups, ints(len(query_lens)))
    if isinstance(decoder, DraftHead):
        batch.states = ints(num_tokens, decoder.config.hidden_size, dtype=torch.bfloat16)
    return decoder.forward(batch, kv)


def decoder_of(family: str, folder: Path) -> Decoder:
    make_checkpoint(family, folder, max_position_embeddings=1024)
    config = read_config(folder)
    return load_decoder(folder, config, device=torch.device("cpu"), dtype=torch.bfloat16, context_len=1024)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_forward_pass_waits_for_nothing(family: str, tmp_path: Path, launches: list[str]) -> None:
    real = decoder_of(family, tmp_path)
    with FakeTensorMode():
        decoder = on_gpu(real, TritonElementwise())
        kv = KVPool(real.config, [100] * len(real.config.kv_groups), 16, torch.bfloat16, CUDA)
        num_layers = len(real.config.layers)
        for name, (query_lens, context_lens) in BATCHES.items():
            launches.clear()
            with Products() as products:
                logits = forward(decoder, kv, query_lens, context_lens)
            assert not products.found, "every product has one order of summation (law L14)"
            assert logits.shape == (len(query_lens), real.config.vocab_size) and logits.device == CUDA
            counts = {kernel: launches.count(kernel) for kernel in set(launches)}
            assert counts["embed_kernel"] == 1 and counts["rotate_kernel"] == num_layers
            assert counts.get("expert_gate_kernel", 0) == counts.get("expert_down_kernel", 0)
            assert counts.get("gated_kernel", 0) + counts.get("expert_gate_kernel", 0) >= num_layers
            assert counts.get("latent_kernel", 0) == (num_layers if family.startswith("deepseek") else 0)
            assert counts["add_norm_kernel"] >= 2 * num_layers
            assert counts["product_kernel"] >= 2 * num_layers + 1
            assert counts["extend_kernel"] + counts.get("sum_kernel", 0) >= num_layers
            assert ("decode_kernel" in counts) == (name != "prefill" and _keeps_all(real))
            assert counts.get("decode_kernel", 0) == counts.get("sum_kernel", 0)


@pytest.mark.parametrize("kind", ["MTP", "EAGLE3"])
def test_a_head_waits_for_nothing(kind: str, tmp_path: Path, launches: list[str]) -> None:
    folders, given = (tmp_path / "head", tmp_path / "target"), {"device": torch.device("cpu"), "dtype": torch.bfloat16}
    if kind == "MTP":
        make_mtp(folders[1])
    else:
        make_eagle3(folders[0], "llama", folders[1])
    target = read_config(folders[1])
    config = mtp_config(target) if kind == "MTP" else eagle3_config(folders[0], target)
    real = load_head(folders[0], config, folders[1], target, context_len=1024, kernels=TORCH, **given)
    with FakeTensorMode():
        head = on_gpu(real, TritonElementwise())
        assert isinstance(head, DraftHead)
        kv = KVPool(real.config, [100], 16, torch.bfloat16, CUDA)
        for query_lens, context_lens in BATCHES.values():
            with Products() as products:
                logits = forward(head, kv, query_lens, context_lens)
                shape = (5, len(config.taps), config.target_size)
                states = head.states_of(torch.empty(shape, dtype=torch.bfloat16, device=CUDA))
            assert len(products.found) == (kind == "EAGLE3"), "the fusion of states, whose bits are a guess's"
            assert logits.shape == (len(query_lens), config.num_choices)
            assert states.shape == (5, real.config.hidden_size)
    assert "product_kernel" in launches


@pytest.mark.parametrize("family", ["llama", "gpt-oss", "deepseek-v3"])
def test_kv_in_8_bits_is_read_and_written_by_the_kernels(family: str, tmp_path: Path, launches: list[str]) -> None:
    real = decoder_of(family, tmp_path)
    with FakeTensorMode():
        decoder = on_gpu(real, TritonElementwise())
        kv = KVPool(real.config, [100] * len(real.config.kv_groups), 16, FP8, CUDA)
        for query_lens, context_lens in BATCHES.values():
            logits = forward(decoder, kv, query_lens, context_lens)
            assert logits.shape == (len(query_lens), real.config.vocab_size)
    assert launches.count("rotate_kernel") == len(BATCHES) * len(real.config.layers)


def _keeps_all(decoder: Decoder) -> bool:
    """Whether a group reads more than one split of 900 tokens."""
    return any(not 0 < group.window <= 256 for group in decoder.config.kv_groups)


@pytest.mark.parametrize("ended", [False, True])
def test_a_choice_of_every_kind_waits_for_nothing(ended: bool, launches: list[str]) -> None:
    """And its results, whatever they are, are one tensor."""
    kinds = [
        SamplingParams(),
        SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=3, num_logprobs=4),
        SamplingParams(repetition_penalty=1.1, presence_penalty=0.1, logit_bias=((3, 1.0),), min_tokens=4),
        SamplingParams(num_logprobs=2, logprob_start=0, logprob_token_ids=(5, 6)),
    ]
    turns = [
        Turn(str(i), str(i), "", new_tokens(range(9)), 8, 0, params, end_tokens=END) for i, params in enumerate(kinds)
    ]
    work = [
        Work(turns[0], 0, 8, 1, True),
        Work(turns[1], 1, 8, 3, True, Draft(new_tokens([7, 9]))),
        Work(turns[2], 2, 8, 2, True, Draft(new_tokens([8]))),
        Work(turns[3], 3, 0, 8, True, scored=range(7)),
    ]
    masks = {"1": [b"\xff" * 16] * 3}
    with FakeTensorMode():
        counts = PenaltyCounts(128, CUDA)
        for _ in range(3):
            wanted = choice.Choice(work, [ended, *[False] * 3], masks)
            chosen, results = wanted.queue(torch.empty(7 + 7, 128, device=CUDA), counts)
            assert chosen.device == results.device == CUDA and len(chosen) == 7 - ended
            rows = 3 + 1 + 7
            assert results.shape == (len(chosen) + rows * (1 + 1 + 2 * 4) + 2 * (1 + 7),)


class Ops(TorchDispatchMode):
    """Notes what is done beside a graph's replay."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["llama", "gpt-oss", "deepseek-v3"])
def test_a_captured_decode_waits_for_nothing(
    family: str, tmp_path: Path, launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside its replay a step copies what its batch says, and makes nothing but that."""
    real = decoder_of(family, tmp_path)
    # The method asks for a CUDA build of torch, the operation does not.
    monkeypatch.setattr(torch.Tensor, "copy_", lambda to, of: torch.ops.aten.copy_.default(to, of))
    with FakeTensorMode():
        decoder, num_groups = on_gpu(real, TritonElementwise()), len(real.config.kv_groups)
        kv = KVPool(real.config, [100] * num_groups, 16, torch.bfloat16, CUDA)
        tables = [torch.zeros(9, 64, dtype=torch.int32, device=CUDA) for _ in range(num_groups)]
        graphs = DecodeGraphs(
            decoder, kv, tables, plan_triton_decodes, lambda run: (run(), lambda: None), max_batch=4, context_len=1024
        )
        assert launches.count("embed_kernel") == len(sizes_up_to(4)) == 4
        launches.clear()
        batch = Batch([4, 0, 7], [40, 3, 900], [1, 1, 1], new_tokens([5, -1, -2]), [0, 1, 2])
        with Ops() as ops:
            decoded = graphs.forward(batch, lambda numbers: torch.zeros(2, dtype=torch.int64, device=CUDA))
        assert decoded is not None and decoded[1].shape == (3, real.config.vocab_size)
        assert decoded[1].device == CUDA and not launches
        views = {"view", "narrow", "slice", "select", "device"}
        assert ops.names - views <= {"empty", "zeros", "to", "_to_copy", "copy_", "index_put_"}


def test_a_value_that_the_host_reads_raises(tmp_path: Path, launches: list[str]) -> None:
    """Or else the test above could not fail."""
    real = decoder_of("llama", tmp_path)

    class Reads(TritonElementwise):
        def gated(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
            return super().gated(gate_up, activation) * gate_up.sum().item()

    with FakeTensorMode():
        kv = KVPool(real.config, [100], 16, torch.bfloat16, CUDA)
        with pytest.raises(DataDependentOutputException):
            forward(on_gpu(real, Reads()), kv, [1], [5])
