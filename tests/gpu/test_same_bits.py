"""Law L14 on a GPU, in bf16: a turn has the same tokens and logprobs, bit for bit, however its steps are computed.

Alone or in a batch, launched or replayed, with and without overlap, in chunks of any size, retracted, continued
elsewhere, from pages of any size.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.parity.checkpoints import make_checkpoint, pack_experts
from tests.workers.engine import Engine
from workers.config import EngineConfig
from workers.scheduling import SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

WIDE: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
}
LATENT = {"q_lora_rank": 256, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128},
    "qwen3-moe": {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "moe_intermediate_size": 512},
    "gemma2": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 256, "sliding_window": 100},
    "gpt-oss": {"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 64, "sliding_window": 128},
    "deepseek-v3": {"num_attention_heads": 16, "num_key_value_heads": 16, "moe_intermediate_size": 512} | LATENT,
}
CONFIG = EngineConfig(
    device="cuda", dtype="bfloat16", max_running_requests=16, max_total_tokens=32_768, chunked_prefill_size=512
)
LENGTHS = (5, 700, 33, 129, 1300, 64, 1, 2100, 17, 513)
OUTPUT = 24


def prompt(i: int) -> list[int]:
    rng = random.Random(i)
    return [rng.randrange(3, 4096) for _ in range(LENGTHS[i])]


def params(i: int) -> SamplingParams:
    return SamplingParams(max_tokens=OUTPUT, temperature=1.0, seed=i, ignore_eos=True, num_logprobs=2)


def said(engine: Engine, name: str) -> list[tuple[int, Any]]:
    """A turn's tokens, each with its logprobs."""
    updates = engine.updates[name]
    tokens = [token for update in updates for token in update.tokens]
    return list(zip(tokens, [logprob for update in updates for logprob in update.logprobs], strict=True))


def all_at_once(engine: Engine) -> list[Any]:
    for i in range(len(LENGTHS)):
        engine.submit(f"t{i}", f"s{i}", prompt(i), params(i))
    engine.run()
    return [said(engine, f"t{i}") for i in range(len(LENGTHS))]


def one_by_one(engine: Engine) -> list[Any]:
    results = []
    for i in range(len(LENGTHS)):
        engine.submit(f"t{i}", f"s{i}", prompt(i), params(i))
        engine.run()
        results.append(said(engine, f"t{i}"))
    return results


def continued(engine: Engine, first: list[Any]) -> list[Any]:
    """As after a failover: a part of the outputs is given."""
    for i, output in enumerate(first):
        tokens = prompt(i) + [token for token, _ in output[: 3 + i]]
        engine.submit(f"t{i}", f"s{i}", tokens, params(i), prompt_len=LENGTHS[i])
    engine.run()
    return [first[i][: 3 + i] + said(engine, f"t{i}") for i in range(len(LENGTHS))]


def pack(folder: Path) -> None:
    """Have the checkpoint's experts in MXFP4."""
    state = load_file(folder / "model.safetensors")
    pack_experts(state, (119, 122))
    save_file(state, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(params=[*SHAPES, "llama, fp8 KV", "deepseek-v3, fp8 KV", "gpt-oss, MXFP4"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, Any]]:
    family, _, kind = request.param.partition(", ")
    make_checkpoint(family, tmp_path, num_hidden_layers=4, **WIDE, **SHAPES[family])
    if kind == "MXFP4":
        pack(tmp_path)
    yield {"model": tmp_path, "kv_cache_dtype": "fp8_e4m3" if kind == "fp8 KV" else "auto"}


def test_a_turn_has_the_same_bits_however_it_is_computed(config: dict[str, Any]) -> None:
    first = all_at_once(Engine(CONFIG, **config))
    assert all(len(output) == OUTPUT for output in first)
    others = {
        "alone": one_by_one(Engine(CONFIG, **config)),
        "launched": all_at_once(Engine(CONFIG, **config, disable_cuda_graph=True)),
        "no overlap": all_at_once(Engine(CONFIG, **config, overlap_schedule=False)),
        "chunks": all_at_once(Engine(CONFIG, **config, chunked_prefill_size=48)),
        "two at once": all_at_once(Engine(CONFIG, **config, max_running_requests=2)),
        "pages of 64": all_at_once(Engine(CONFIG, **config, page_size=64)),
        "pages of 1": all_at_once(Engine(CONFIG, **config, page_size=1)),
        "continued": continued(Engine(CONFIG, **config), first),
    }
    tight = Engine(CONFIG, **config, max_total_tokens=2400, swa_full_tokens_ratio=1.0)
    others["retracted"] = all_at_once(tight)
    assert tight.scheduler.num_retracted > 0
    differing = {
        name: [i for i, (a, b) in enumerate(zip(first, other, strict=True)) if a != b]
        for name, other in others.items()
        if other != first
    }
    assert not differing
