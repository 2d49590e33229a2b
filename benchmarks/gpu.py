"""Decode steps and prefills of the engine alone, on one GPU, beside the floor and transformers. Needs no Ray.

The checkpoints have the shapes of Llama 3.1 8B and gpt-oss 20B, and random weights. A floor is the time in which the
GPU copies the bytes that a step must read, as fast as it copies a large tensor in the same run.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.predict import MODELS, Model
from workers.config import EngineConfig
from workers.engine.leader import Leader
from workers.engine.messages import Submission
from workers.scheduling import SamplingParams

LLAMA, GPT_OSS = MODELS
DECODES = ((1, 1024), (16, 4096), (64, 4096), (256, 1024))
PROMPTS = (1024, 8192, 32_768)
STEPS, WARM_UP = 60, 10


def llama_config(model: Model) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rope_theta": 500_000.0,
        "intermediate_size": model.feed_forward,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
    }


def gpt_oss_config(model: Model) -> dict[str, Any]:
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "rope_theta": 150_000.0,
        "intermediate_size": model.feed_forward,
        "num_local_experts": model.experts,
        "num_experts_per_tok": model.top_k,
        "sliding_window": model.window,
        "layer_types": ["sliding_attention", "full_attention"] * (model.layers // 2),
        "rms_norm_eps": 1e-5,
        "swiglu_limit": 7.0,
        "attention_bias": True,
        "quantization_config": {"quant_method": "mxfp4"},
    }


def layer_tensors(model: Model, layer: int) -> Iterator[tuple[str, torch.Tensor]]:
    def randn(*shape: int) -> torch.Tensor:
        values: torch.Tensor = torch.randn(*shape, device="cuda") * float(shape[-1]) ** -0.5
        return values.bfloat16().cpu()

    def bytes_of(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, device="cuda", dtype=torch.uint8).cpu()

    at = f"model.layers.{layer}"
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    for name, rows in (("q", q), ("k", kv), ("v", kv)):
        yield f"{at}.self_attn.{name}_proj.weight", randn(rows, model.hidden)
        if model.experts > 1:
            yield f"{at}.self_attn.{name}_proj.bias", randn(rows)
    yield f"{at}.self_attn.o_proj.weight", randn(model.hidden, q)
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{at}.{name}.weight", torch.ones(model.hidden, dtype=torch.bfloat16)
    if model.experts == 1:
        yield f"{at}.mlp.gate_proj.weight", randn(model.feed_forward, model.hidden)
        yield f"{at}.mlp.up_proj.weight", randn(model.feed_forward, model.hidden)
        yield f"{at}.mlp.down_proj.weight", randn(model.hidden, model.feed_forward)
        return
    yield f"{at}.self_attn.o_proj.bias", randn(model.hidden)
    yield f"{at}.self_attn.sinks", randn(model.heads)
    yield f"{at}.mlp.router.weight", randn(model.experts, model.hidden)
    yield f"{at}.mlp.router.bias", randn(model.experts)
    for name, rows, depth in (
        ("gate_up", 2 * model.feed_forward, model.hidden),
        ("down", model.hidden, model.feed_forward),
    ):
        proj = f"{at}.mlp.experts.{name}_proj"
        yield f"{proj}_blocks", bytes_of(0, 256, model.experts, rows, depth // 32, 16)
        yield f"{proj}_scales", bytes_of(117, 121, model.experts, rows, depth // 32)
        yield f"{proj}_bias", randn(model.experts, rows)


def make_checkpoint(model: Model, folder: Path) -> None:
    """Random weights of the model's shapes."""
    config = gpt_oss_config(model) if model.experts > 1 else llama_config(model)
    config |= {
        "hidden_size": model.hidden,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    names: dict[str, str] = {}

    def write(file: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, folder / file, metadata={"format": "pt"})
        names.update(dict.fromkeys(tensors, file))

    for layer in range(model.layers):
        write(f"layer-{layer}.safetensors", dict(layer_tensors(model, layer)))
    for file, name in (("embed", "model.embed_tokens.weight"), ("head", "lm_head.weight")):
        table = (torch.randn(model.vocab, model.hidden, device="cuda") * model.hidden**-0.5).bfloat16().cpu()
        write(f"{file}.safetensors", {name: table})
    write("norm.safetensors", {"model.norm.weight": torch.ones(model.hidden, dtype=torch.bfloat16)})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


def tokens_of(seed: int, length: int, vocab: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(vocab) for _ in range(length)]


class Engine:
    """A leader that is stepped here."""

    def __init__(self, model: Model, folder: Path, **settings: Any) -> None:
        self._model = model
        began = time.perf_counter()
        given: dict[str, Any] = {
            "device": "cuda",
            "context_length": 40_000,
            "max_running_requests": 256,
        } | settings
        self.leader = Leader(EngineConfig(model=folder, **given), lambda updates: None, self._fail)
        torch.cuda.synchronize()
        self.load_s = time.perf_counter() - began
        self._turns = 0

    def _fail(self, error: BaseException) -> None:
        raise error

    def submit(self, length: int, max_tokens: int) -> None:
        self._turns += 1
        name = f"t{self._turns}"
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        tokens = array("i", tokens_of(self._turns, length, self._model.vocab))
        self.leader._admit(Submission(name, name, "", 1, tokens, length, params), None)

    def release(self) -> None:
        """End every turn and free what it holds."""
        self.leader.collect()
        for turn in list(self.leader.scheduler.turns.values()):
            self.leader.abort(turn.turn_id)
        for i in range(1, self._turns + 1):
            self.leader.release_session(f"t{i}", 1)
        while not self.leader._commands.empty():
            command = self.leader._commands.get()
            assert command is not None
            command()
        self.leader.step()

    def prefill_s(self, prompt: int) -> float:
        """Seconds of a prompt's prefill and first token."""
        self.submit(prompt, 1)
        torch.cuda.synchronize()
        began = time.perf_counter()
        while self.leader.scheduler.turns:
            self.leader.step()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        self.release()
        return seconds

    def fill(self, batch: int, context: int) -> None:
        """Turns that decode, with so much context each."""
        for _ in range(batch):
            self.submit(context, STEPS + WARM_UP + 100)
        turns = list(self.leader.scheduler.turns.values())
        while not all(turn.num_output for turn in turns):
            self.leader.step()
        for _ in range(WARM_UP):
            self.leader.step()

    def decode_s(self) -> float:
        """Seconds of a step of the turns that there are."""
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(STEPS):
            self.leader.step()
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / STEPS

    def profile(self, steps: int = 5) -> str:
        """Where the device's time goes, by kernel."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            for _ in range(steps):
                self.leader.step()
            torch.cuda.synchronize()
        rows = sorted(found.key_averages(), key=lambda event: -event.self_device_time_total)[:14]
        total = sum(event.self_device_time_total for event in found.key_averages()) / steps
        lines = [f"{total / 1e3:.3f} ms of kernels a step"]
        for event in rows:
            spent, count = event.self_device_time_total, event.count
            lines.append(
                f"{spent / steps / 1e3:8.3f} ms {count // steps:5d} x {spent / count:7.1f} us {event.key[:70]}"
            )
        return "\n".join(lines)


def copy_speed() -> float:
    """Bytes/s that a large copy reads and writes."""
    source = torch.randn(2**30, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return float(2 * source.nbytes / sorted(times)[len(times) // 2])


def floor_s(model: Model, batch: int, context: int, speed: float, kv_bytes: int) -> float:
    kv = batch * model.attended(context) * 2 * model.kv_heads * model.head_dim * kv_bytes
    return (model.bytes_read(batch) + kv) / speed


def of_transformers(folder: Path, model: Model, decodes: list[tuple[int, int]]) -> dict[str, float]:
    """Milliseconds a decode step, of transformers with its own kernels."""
    from transformers import AutoModelForCausalLM

    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map="cuda")
    figures = {}
    with torch.inference_mode():
        for batch, context in decodes:
            ids = torch.randint(0, model.vocab, (batch, context), device="cuda")
            cache = None
            for row in range(0, context, 512):  # in parts: logits of a whole batch are large
                answer = peer(ids[:, row : row + 512], past_key_values=cache, use_cache=True, logits_to_keep=1)
                cache = answer.past_key_values
            token = answer.logits[:, -1].argmax(-1, keepdim=True)
            for step in range(25):
                if step == 5:
                    torch.cuda.synchronize()
                    began = time.perf_counter()
                answer = peer(token, past_key_values=cache, use_cache=True)
                token = answer.logits[:, -1].argmax(-1, keepdim=True)
            torch.cuda.synchronize()
            figures[f"{batch} x {context}"] = 1e3 * (time.perf_counter() - began) / 20
            del cache, answer
    return figures


def measure(model: Model, folder: Path, arguments: argparse.Namespace, speed: float) -> None:
    engine = Engine(model, folder, tile_table=arguments.tile_table, **json.loads(arguments.settings))
    print(f"loaded and captured in {engine.load_s:.1f} s; settings {arguments.settings}", flush=True)
    kv_bytes = engine.leader.rank.kv.dtype.itemsize
    engine.prefill_s(64), engine.prefill_s(9000)  # compiles
    for prompt in arguments.prompts:
        seconds = engine.prefill_s(prompt)
        print(f"prefill {prompt}: {prompt / seconds:,.0f} tokens/s", flush=True)
    for batch, context in arguments.decodes:
        began = time.perf_counter()
        engine.fill(batch, context)
        filled_s = time.perf_counter() - began
        seconds, floor = engine.decode_s(), floor_s(model, batch, context + STEPS, speed, kv_bytes)
        print(
            f"decode {batch} x {context}: {1e3 * seconds:.2f} ms, floor {1e3 * floor:.2f}, {seconds / floor:.2f}x "
            f"(filled in {filled_s:.1f} s)",
            flush=True,
        )
        if arguments.profile:
            print(engine.profile(), flush=True)
        engine.release()
    if arguments.profile:
        engine.submit(8192, 1)
        print("prefill of 8192:", engine.profile(1), flush=True)


def pair(text: str) -> tuple[int, int]:
    batch, context = text.split("x")
    return int(batch), int(context)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=["llama", "gpt-oss"])
    parser.add_argument("--decodes", type=pair, nargs="*", default=DECODES)
    parser.add_argument("--prompts", type=int, nargs="*", default=PROMPTS)
    parser.add_argument("--settings", default="{}", help="of the engine, as JSON")
    parser.add_argument("--tile-table", type=Path, help="what holdfast tune wrote")
    parser.add_argument("--folder", type=Path, help="where the checkpoint is, or is written to and kept")
    parser.add_argument("--profile", action="store_true", help="print where the device's time goes")
    parser.add_argument("--transformers", action="store_true", help="measure transformers instead")
    arguments = parser.parse_args()
    model = LLAMA if arguments.model == "llama" else GPT_OSS
    speed = copy_speed()
    print(f"{torch.cuda.get_device_name()}: copies {speed / 1e12:.2f} TB/s")
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir="/dev/shm") as own:
        folder = arguments.folder or Path(own)
        folder.mkdir(exist_ok=True)
        if not (folder / "model.safetensors.index.json").exists():
            began = time.perf_counter()
            make_checkpoint(model, folder)
            print(f"written in {time.perf_counter() - began:.1f} s", flush=True)
        if arguments.transformers:
            for name, ms in of_transformers(folder, model, arguments.decodes).items():
                print(f"transformers decode {name}: {ms:.2f} ms", flush=True)
        else:
            measure(model, folder, arguments, speed)


if __name__ == "__main__":
    main()
