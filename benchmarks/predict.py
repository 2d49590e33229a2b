"""Predicts a GPU's decode steps and prefills from bytes and operations, and writes the tables of docs/gpu.md.

A step takes as long as the slower of two: reading every byte that it needs at ``BANDWIDTH_SHARE`` of the memory's
speed, or its operations at ``PEAK_SHARE`` of the tensor cores'. Nothing is measured, and the host is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

DOCUMENT = Path(__file__).parents[1] / "docs" / "gpu.md"
BEGIN, END = "<!-- predicted -->\n", "<!-- end -->"
BANDWIDTH_SHARE, PEAK_SHARE = 0.8, 0.5
"""What well-made kernels reach."""
DECODES = ((1, 1024), (16, 4096), (64, 4096), (64, 16_384), (256, 1024))
"""Batch and tokens of context of each turn."""
PROMPTS = (1024, 8192, 32_768)


@dataclass(frozen=True)
class Gpu:
    name: str
    bytes_per_s: float
    memory_bytes: float
    flops: float
    """Dense bf16."""


GPUS = (Gpu("H100 SXM", 3.35e12, 80e9, 989e12), Gpu("H200", 4.8e12, 141e9, 989e12))


@dataclass(frozen=True)
class Model:
    """A decoder: what is read for every token, and what by tokens that go there. Weights have 2 bytes, or fewer."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    feed_forward: int
    """Of the dense layer, or of one expert."""
    experts: int = 1
    top_k: int = 1
    window: int = 0
    """Of every other layer."""
    expert_bytes: float = 2.0
    """Of a weight of an expert."""

    @property
    def attention_weights(self) -> int:
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def expert_weights(self) -> int:
        return 3 * self.hidden * self.feed_forward

    def bytes_read(self, tokens: int) -> float:
        """Of weights, in a step of so many tokens: experts that no token chooses are not read."""
        chosen = self.experts * (1 - (1 - self.top_k / self.experts) ** tokens) if self.experts > 1 else 1
        router = self.hidden * self.experts if self.experts > 1 else 0
        each = 2 * (self.attention_weights + router) + self.expert_bytes * chosen * self.expert_weights
        return self.layers * each + 2 * self.vocab * self.hidden

    def weights_used(self) -> float:
        """Parameters that one token is multiplied with, without the head."""
        return self.layers * (self.attention_weights + self.top_k * self.expert_weights)

    def attended(self, context: int) -> float:
        """Positions that a token attends to, over all layers."""
        short = self.layers // 2 if self.window else 0
        return short * min(self.window, context) + (self.layers - short) * context

    @property
    def stored_bytes(self) -> float:
        experts = self.expert_bytes * self.experts * self.expert_weights
        return self.layers * (2 * self.attention_weights + experts) + 4 * self.vocab * self.hidden


MODELS = (
    Model("Llama 3.1 8B", 4096, 32, 32, 8, 128, 128_256, 14_336),
    Model("gpt-oss 20B", 2880, 24, 64, 8, 64, 201_088, 2880, experts=32, top_k=4, window=128, expert_bytes=17 / 32),
)


def decode_ms(model: Model, gpu: Gpu, batch: int, context: int, kv_bytes: int) -> float:
    """One step of ``batch`` turns with ``context`` tokens each, whose KV has ``kv_bytes`` an element."""
    kv = batch * model.attended(context) * 2 * model.kv_heads * model.head_dim * kv_bytes
    moved = model.bytes_read(batch) + kv
    operations = 2 * batch * (model.weights_used() + model.vocab * model.hidden)
    operations += 4 * batch * model.attended(context) * model.heads * model.head_dim
    return 1e3 * max(moved / (BANDWIDTH_SHARE * gpu.bytes_per_s), operations / (PEAK_SHARE * gpu.flops))


def prefill_tokens_per_s(model: Model, gpu: Gpu, prompt: int) -> float:
    """Of one prompt: each token attends to half of it on average."""
    operations = 2 * model.weights_used() + 4 * model.attended(prompt // 2) * model.heads * model.head_dim
    return PEAK_SHARE * gpu.flops / operations


def fits(model: Model, gpu: Gpu, batch: int, context: int, kv_bytes: int) -> bool:
    kv = batch * model.attended(context) * 2 * model.kv_heads * model.head_dim * kv_bytes
    return model.stored_bytes + kv < 0.92 * gpu.memory_bytes


def tables() -> str:
    """The tables of docs/gpu.md."""
    columns = [(gpu, kv_bytes) for gpu in GPUS for kv_bytes in (2, 1)]
    names = [f"{gpu.name}{', fp8 KV' if kv_bytes == 1 else ''}" for gpu, kv_bytes in columns]
    lines = [f"| ms a decode step: batch x context | {' | '.join(names)} |", "| --- |" + " --- |" * len(names)]
    for model in MODELS:
        for batch, context in DECODES:
            cells = [
                f"{decode_ms(model, gpu, batch, context, kv_bytes):.1f}"
                if fits(model, gpu, batch, context, kv_bytes)
                else "too large"
                for gpu, kv_bytes in columns
            ]
            lines.append(f"| {model.name}, {batch} x {context:,} | {' | '.join(cells)} |")
    lines += ["", "| thousand tokens/s of prefill, one prompt of | " + " | ".join(f"{p:,}" for p in PROMPTS) + " |"]
    lines.append("| --- |" + " --- |" * len(PROMPTS))
    for model in MODELS:
        speeds = [f"{prefill_tokens_per_s(model, GPUS[0], prompt) / 1e3:.1f}" for prompt in PROMPTS]
        lines.append(f"| {model.name}, {' and '.join(gpu.name for gpu in GPUS)} | {' | '.join(speeds)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the document's tables."""
    head, rest = DOCUMENT.read_text().split(BEGIN)
    DOCUMENT.write_text(head + BEGIN + tables() + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
