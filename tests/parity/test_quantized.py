"""Checkpoints with FP8 blocks and MXFP4 load as what their values say."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.parity.checkpoints import make_checkpoint, pack_experts
from tests.parity.test_logits import PagedModel, load
from workers.kernels.backend import load_backend
from workers.kernels.packed import FP4_VALUES, FP8Weight, MXFP4Planes, from_mxfp4
from workers.models import read_config
from workers.models.feed_forward import ExpertsWeights
from workers.models.loader import Loader
from workers.models.parallel import Shard
from workers.models.spec import ModelConfig
from workers.models.tensors import Tensors, weight_files

BLOCK = (8, 16)
FP8_MAX = 448.0


def logits(folder: Path) -> torch.Tensor:
    return PagedModel(load(folder), 4).feed(list(range(5, 45)))


def rewrite(folder: Path, state: dict[str, torch.Tensor], **config: Any) -> None:
    save_file(state, folder / "model.safetensors")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))


def blocks_of(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A weight in E4M3 blocks, their inverse scales, and what the two stand for. The last blocks are cut."""
    rows, columns = weight.shape
    scales = torch.empty(-(-rows // BLOCK[0]), -(-columns // BLOCK[1]))
    stored, meant = torch.empty(rows, columns, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = (slice(i * BLOCK[0], (i + 1) * BLOCK[0]), slice(j * BLOCK[1], (j + 1) * BLOCK[1]))
            scales[i, j] = weight[at].abs().max() / FP8_MAX
            stored[at] = (weight[at] / scales[i, j]).to(torch.float8_e4m3fn)
            meant[at] = stored[at].float() * scales[i, j]
    return stored, scales, meant


def test_fp8_blocks(tmp_path: Path) -> None:
    make_checkpoint("deepseek-v3", tmp_path)
    plain, quantized = load_file(tmp_path / "model.safetensors"), {}
    for name, weight in list(plain.items()):
        quantized[name] = weight
        if name.endswith("_proj.weight") or ("kv_a_proj" in name and weight.ndim == 2):
            quantized[name], quantized[f"{name}_scale_inv"], plain[name] = blocks_of(weight)
    rewrite(tmp_path, plain)
    expected = logits(tmp_path)
    rewrite(tmp_path, quantized, quantization_config={"quant_method": "fp8", "weight_block_size": list(BLOCK)})
    torch.testing.assert_close(logits(tmp_path), expected, atol=1e-5, rtol=1e-5)
    check_packed(tmp_path, FP8Weight, expected, moe_layer=1)


@pytest.mark.parametrize("seed", [0, 1])
def test_mxfp4(tmp_path: Path, seed: int) -> None:
    make_checkpoint("gpt-oss", tmp_path, hidden_size=64, intermediate_size=96, seed=seed)
    plain = load_file(tmp_path / "model.safetensors")
    quantized = dict(plain)
    generator = torch.Generator().manual_seed(seed)
    for name in [name for name in plain if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = plain[name].shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(122, 126, (experts, rows, columns // 32), generator=generator, dtype=torch.uint8)
        del quantized[name]
        quantized |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = torch.stack([by_hand(*pair) for pair in zip(blocks, scales, strict=True)]).transpose(1, 2)
        plain[name] = plain[name].contiguous()
    rewrite(tmp_path, plain)
    expected = logits(tmp_path)
    rewrite(tmp_path, quantized, quantization_config={"quant_method": "mxfp4"})
    torch.testing.assert_close(logits(tmp_path), expected, atol=1e-5, rtol=1e-5)
    check_packed(tmp_path, MXFP4Planes, expected, moe_layer=0)


def check_packed(folder: Path, kind: type, expected: torch.Tensor, moe_layer: int) -> None:
    """A GPU's kernels multiply with the weights as they are stored."""
    decoder = load(folder, kernels="triton")
    experts = decoder.weights.layers[moe_layer].feed_forward
    assert isinstance(experts, ExpertsWeights)
    assert isinstance(experts.gate_up, kind) and isinstance(experts.down, kind)
    mixer = decoder.weights.layers[moe_layer].mixer
    assert isinstance(mixer.o, FP8Weight) == (kind is FP8Weight)
    got = PagedModel(decoder, 4).feed(list(range(5, 17)))
    torch.testing.assert_close(got, expected[: len(got)], atol=1e-4, rtol=1e-4)


def unpacked(weight: MXFP4Planes) -> torch.Tensor:
    """What the words of a weight mean, in fp32."""
    words = weight.words.transpose(1, 2).unsqueeze(3).int() & 0xFFFF
    last = (words << 1 & 0x8000) | (words >> 5 & 0x100) | (words >> 4 & 0xC0)
    bits = torch.cat([*(words << shift & 0x81C0 for shift in (0, 3, 6)), last], dim=3)
    signed = torch.tensor((*FP4_VALUES, *(-value for value in FP4_VALUES)))
    values = signed[(bits >> 12 & 8) | (bits >> 6 & 7)]
    scales = weight.scales.transpose(1, 2)
    exponents = torch.stack([scales >> shift & 0xFF for shift in (0, 8, 16, 24)], dim=-1)
    powers = torch.exp2(exponents.float() - 127).unsqueeze(-1)
    return (values * powers).flatten(2)[..., : weight.depth]


@pytest.mark.parametrize(("size", "is_packed"), [(128, True), (96, False)])
def test_a_share_that_cuts_a_group_of_mxfp4_is_dequantized(tmp_path: Path, size: int, is_packed: bool) -> None:
    """Of 96 columns in groups of 32, each of two ranks has one and a half."""
    make_checkpoint("gpt-oss", tmp_path, hidden_size=64, intermediate_size=size)
    state = load_file(tmp_path / "model.safetensors")
    pack_experts(state, (122, 126))
    rewrite(tmp_path, state, quantization_config={"quant_method": "mxfp4"})
    config = read_config(tmp_path)
    whole = experts_of(tmp_path, config, "torch_native", Shard())
    for rank in range(2):
        packed, plain = (experts_of(tmp_path, config, name, Shard(rank, 2)) for name in ("triton", "torch_native"))
        assert isinstance(packed.down, MXFP4Planes) == is_packed == isinstance(packed.gate_up, MXFP4Planes)
        for name in ("gate_up", "down"):
            ours, theirs = getattr(packed, name), getattr(plain, name)
            assert torch.equal(unpacked(ours) if is_packed else ours, theirs)
        mine = slice(rank * size // 2, (rank + 1) * size // 2)
        assert torch.equal(plain.down, whole.down[..., mine])  # type: ignore[index]  # torch's are tensors


def experts_of(folder: Path, config: ModelConfig, kernels: str, shard: Shard) -> ExpertsWeights:
    with ExitStack() as stack:
        tensors = Tensors(weight_files(folder), stack, torch.device("cpu"), torch.float32)
        backend = load_backend(kernels, torch.device("cpu"))
        loader = Loader(tensors, config, config.shard(shard), shard, torch.float32, backend)
        weights = loader.layer("model.layers.0", config.layers[0], config.shard(shard).layers[0]).feed_forward
    assert isinstance(weights, ExpertsWeights)
    return weights


def by_hand(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """One value at a time, as the specification says."""

    def value(bits: int) -> float:
        return (-1.0 if bits & 8 else 1.0) * FP4_VALUES[bits & 7]

    rows = []
    for row, row_scales in zip(blocks.tolist(), scales.tolist(), strict=True):
        values = []
        for group, scale in zip(row, row_scales, strict=True):
            for byte in group:
                values += [value(byte & 15) * 2.0 ** (scale - 127), value(byte >> 4) * 2.0 ** (scale - 127)]
        rows.append(values)
    return torch.tensor(rows)


def test_every_value_of_mxfp4() -> None:
    blocks = torch.arange(16, dtype=torch.uint8)[None, None, :] * 17
    scales = torch.tensor([[128]], dtype=torch.uint8)
    both = [2 * v for v in (*FP4_VALUES, *(-v for v in FP4_VALUES)) for _ in range(2)]
    assert from_mxfp4(blocks, scales)[0].tolist() == both
