"""Decodes and prefills on a CPU: its own kernels and torch's side by side, and the floor of what must be read.

The engine alone, on a Llama of 88 million random weights in bf16 and on the bundled model. Each row's settings take
turns, three rounds; figures are medians. The floor of a decode step is its weights and KV over the bandwidth at which
torch adds up 512 MB.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from array import array
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.common import save
from workers.config import BUNDLED_MODEL, EngineConfig
from workers.engine.leader import Leader
from workers.engine.messages import Submission, TurnUpdate
from workers.scheduling import SamplingParams

LAYERS, HIDDEN, WIDTH, HEADS, KV_HEADS, VOCAB = 12, 768, 2048, 12, 4, 8192
SHAPES = ((1, 512), (1, 4096), (3, 1500), (8, 512), (8, 2048))
BUNDLED_SHAPES = ((1, 100), (16, 100))
SETTINGS: dict[str, dict[str, str]] = {
    "bf16": {"dtype": "bfloat16"},
    "auto": {},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "torch, bf16": {"dtype": "bfloat16", "attention_backend": "torch_native"},
    "torch, fp32": {"dtype": "float32", "attention_backend": "torch_native"},
}
ROUNDS, STEPS = 3, 12


def make_llama(folder: Path) -> None:
    """A checkpoint of random weights: only its speed matters."""
    head_dim = HIDDEN // HEADS
    sizes = {"model.embed_tokens": (VOCAB, HIDDEN), "lm_head": (VOCAB, HIDDEN)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        for name, rows in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            sizes[f"{layer}.self_attn.{name}_proj"] = (rows * head_dim, HIDDEN)
        sizes[f"{layer}.self_attn.o_proj"] = (HIDDEN, HIDDEN)
        sizes |= {f"{layer}.mlp.{name}_proj": (WIDTH, HIDDEN) for name in ("gate", "up")}
        sizes[f"{layer}.mlp.down_proj"] = (HIDDEN, WIDTH)
    norms = [f"model.layers.{i}.{name}_layernorm" for i in range(LAYERS) for name in ("input", "post_attention")]
    tensors = {f"{name}.weight": torch.randn(size).mul(0.02).bfloat16() for name, size in sizes.items()}
    tensors |= {f"{name}.weight": torch.ones(HIDDEN).bfloat16() for name in (*norms, "model.norm")}
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "hidden_act": "silu",
        "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": WIDTH, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False, "eos_token_id": 0,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def best(act: Callable[[], object], times: int = 7) -> float:
    """Seconds of the fastest run."""
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def machine() -> dict[str, float]:
    """GB/s of memory read, and GFLOP/s of torch's products."""
    torch.set_num_threads(2)
    memory = torch.ones(128 * 1024 * 1024)
    figures = {"GB/s read": memory.numel() * 4 / best(memory.sum) / 1e9}
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(1536, 1536).to(dtype)
        figures[f"GFLOP/s of torch's {dtype} products"] = 2 * 1536**3 / best(lambda x=x: x @ x) / 1e9  # type: ignore[misc]
    return {name: round(value, 1) for name, value in figures.items()}


def measure(model: Path, batch: int, context: int, settings: dict[str, str]) -> tuple[float, float]:
    """Seconds of a decode step, and tokens/s of the prefills."""
    updates: list[TurnUpdate] = []

    def fail(error: BaseException) -> None:
        raise error

    capacity = batch * (context + STEPS + 16) + 64
    config = EngineConfig(model=model, max_total_tokens=capacity, num_threads=2, **settings)  # type: ignore[arg-type]
    leader = Leader(config, updates.extend, fail)
    params = SamplingParams(max_tokens=STEPS + 8, ignore_eos=True)
    for i in range(batch):
        tokens = array("i", [7 + (p * 31 + i * 7) % 2000 for p in range(context)])
        leader._submit(Submission(f"t{i}", f"s{i}", "", 1, tokens, len(tokens), params))
    began = time.perf_counter()
    while len({update.turn_id for update in updates if update.tokens}) < batch:
        leader.step()
    prefill_s = time.perf_counter() - began
    steps = []
    for _ in range(STEPS):
        began = time.perf_counter()
        leader.step()
        steps.append(time.perf_counter() - began)
    return statistics.median(steps), batch * context / prefill_s


def table(model: Path, shapes: tuple[tuple[int, int], ...], names: list[str]) -> dict[str, dict[str, object]]:
    rows: dict[str, dict[str, object]] = {}
    for batch, context in shapes:
        runs: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
        for _ in range(ROUNDS):
            for name in names:
                runs[name].append(measure(model, batch, context, SETTINGS[name]))
        decode = {name: statistics.median(step for step, _ in of) for name, of in runs.items()}
        prefill = {name: statistics.median(speed for _, speed in of) for name, of in runs.items()}
        rows[f"{batch} x {context}"] = {
            "ms of a decode step": {name: round(1000 * value, 2) for name, value in decode.items()},
            "torch's fp32 over auto, decode": round(decode["torch, fp32"] / decode["auto"], 2),
            "tokens/s of prefill": {name: round(value) for name, value in prefill.items()},
        }
    return rows


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    figures = machine()
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
        make_llama(Path(folder))
        rows = table(Path(folder), SHAPES, list(SETTINGS))
    weights = 2 * (LAYERS * HIDDEN * (2 * HIDDEN + 2 * KV_HEADS * HIDDEN // HEADS + 3 * WIDTH) + VOCAB * HIDDEN)
    of_token = 2 * 2 * LAYERS * KV_HEADS * (HIDDEN // HEADS)
    for (batch, context), row in zip(SHAPES, rows.values(), strict=True):
        row["floor in bf16, ms"] = round((weights + batch * context * of_token) / figures["GB/s read"] / 1e6, 2)
    bundled = table(BUNDLED_MODEL, BUNDLED_SHAPES, ["auto", "torch, fp32"])
    save("cpu", {"this machine": figures, "a Llama of 88 million weights": rows, "the bundled model": bundled})


if __name__ == "__main__":
    main()
