"""Engines whose KV is in 8 bits: the same tokens however the work is cut, in a fraction of the memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from holdfast.errors import ConfigError, UnsupportedModel
from tests.parity.checkpoints import make_checkpoint
from tests.workers.engine import NO_EOS, SMALL, Engine
from tests.workers.groups import GroupEngine
from workers.engine.migration import export_slot, read_pages
from workers.scheduling import SamplingParams

FP8 = {"kv_cache_dtype": "fp8_e4m3"}
GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)
FAMILIES = ["llama", "gpt-oss", "gemma2", "deepseek-v3"]


def prompt(seed: int, length: int) -> list[int]:
    return [5 + (seed * 131 + i * 17) % 190 for i in range(length)]


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_do_not_depend_on_chunks_batches_or_retracts(family: str, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path)
    given = {"model": tmp_path, "page_size": 4} | FP8
    alone = [Engine(SMALL, **given).generate(f"s{i}", prompt(i, 20 + i)) for i in range(5)]
    tight = Engine(SMALL, **given, max_total_tokens=100, chunked_prefill_size=12, swa_full_tokens_ratio=1.0)
    for i in range(5):
        tight.submit(f"t{i}", f"s{i}", prompt(i, 20 + i), NO_EOS)
    tight.run()
    assert tight.scheduler.num_retracted > 0
    assert [tight.output(f"t{i}") for i in range(5)] == alone


@pytest.mark.parametrize("family", ["llama", "deepseek-v3"])
def test_the_kernels_say_what_torch_says(family: str, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path)
    said = []
    for backend in ("torch_native", "triton"):
        engine = Engine(SMALL, model=tmp_path, attention_backend=backend, chunked_prefill_size=20, **FP8)
        first = engine.generate("s", prompt(1, 30), GREEDY)
        said.append([*first, *engine.generate("s", prompt(1, 30) + first + [9, 8], GREEDY)])
    assert said[0] == said[1]


def test_ranks_of_a_group_keep_8_bits_too(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    one, two = Engine(SMALL, model=tmp_path, **FP8), GroupEngine(2, SMALL, model=tmp_path, **FP8)
    assert one.generate("s", prompt(2, 25)) == two.generate("s", prompt(2, 25))
    assert not two.refused and "float8_e4m3fn" in two.leader.rank.layout
    two.stop()


def test_a_page_is_a_quarter_of_fp32_and_migrates_as_it_is() -> None:
    exact, small = Engine(), Engine(**FP8)
    assert [4 * size for size in small.leader.rank.kv.page_bytes] == exact.leader.rank.kv.page_bytes
    assert small.leader.rank.layout != exact.leader.rank.layout, "a worker reads pages of its own kind alone"
    small.generate("s", prompt(1, 40))
    slot = small.cache.slots["s"]
    small.leader.migrations._export("s", "transfer")
    kept = read_pages(small.leader.rank, "transfer", 0, [0, 1])
    assert [len(page) for page in kept] == 2 * small.leader.rank.kv.page_bytes
    assert small.cache.slots[export_slot("transfer")].tables[0].pages[:2] == slot.tables[0].pages[:2]
    target = [small.cache.groups[0].pool.num_pages - 1]
    small.leader.rank.kv.write_pages(0, target, kept[0])
    assert small.leader.rank.kv.read_pages(0, target) == kept[:1]


def test_most_tokens_are_those_of_exact_kv() -> None:
    same = 0
    for seed in range(6):
        outputs = [engine.generate("s", prompt(seed, 60), NO_EOS) for engine in (Engine(), Engine(**FP8))]
        same += sum(a == b for a, b in zip(*outputs, strict=True))
    assert same > 0.5 * 6 * 12, "a greedy output may part from the other, and stays apart then"


def with_scales(folder: Path, k_scale: torch.Tensor, v_scale: torch.Tensor) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    layers = {name.split(".")[2] for name in tensors if name.startswith("model.layers.")}
    for layer in layers:
        tensors[f"model.layers.{layer}.self_attn.k_scale"] = k_scale.clone()
        tensors[f"model.layers.{layer}.self_attn.v_scale"] = v_scale.clone()
    save_file(tensors, file)


def test_a_checkpoint_s_scales_are_used_in_8_bits_alone(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    plain = [Engine(SMALL, model=tmp_path, **more).generate("s", prompt(1, 30)) for more in ({}, FP8)]
    with_scales(tmp_path, torch.tensor(0.5), torch.tensor([4.0]))
    scaled = [Engine(SMALL, model=tmp_path, **more) for more in ({}, FP8)]
    exact, rounded = (engine.generate("s", prompt(1, 30)) for engine in scaled)
    # By powers of two only the smallest elements are rounded otherwise.
    assert exact == plain[0] and rounded[:4] == plain[1][:4]
    assert [engine.leader.rank.kv.scales[0] for engine in scaled] == [(1.0, 1.0), (0.5, 4.0)]
    with_scales(tmp_path, torch.tensor(1e-6), torch.tensor(1.0))
    assert Engine(SMALL, model=tmp_path, **FP8).generate("s", prompt(1, 30)) != plain[1], "all keys saturate"


@pytest.mark.parametrize("scale", [torch.tensor(0.0), torch.tensor([1.0, 2.0]), torch.tensor(torch.inf)])
def test_a_scale_that_cannot_be_is_refused(scale: torch.Tensor, tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    with_scales(tmp_path, scale, torch.tensor(1.0))
    with pytest.raises(UnsupportedModel, match="k_scale: must be one positive number"):
        Engine(SMALL, model=tmp_path)


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype: 'int3' is not one of auto, fp8_e4m3"):
        Engine(kv_cache_dtype="int3")
