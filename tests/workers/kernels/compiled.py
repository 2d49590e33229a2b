"""Compiles the kernels for GPUs that are not here, and says what the compilers say of them.

``python -m tests.workers.kernels.compiled`` writes the table of docs/kernels.md. Without ``TRITON_INTERPRET``: a
kernel that was imported for the interpreter cannot be compiled.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from workers.kernels.attention_launch import constants
from workers.kernels.elementwise_launch import EMBED_BLOCK, GATED_BLOCK, warps_of
from workers.kernels.experts_launch import COLUMNS, SORT_BLOCK, route_constants
from workers.kernels.grouped_experts import RouterSpec
from workers.kernels.packed import FP8Weight, MXFP4Planes
from workers.kernels.packed_launch import format_of
from workers.kernels.products_launch import BAND
from workers.kernels.tiles import attention_tiles, expert_tile, product_tile
from workers.kernels.triton_attention import decode_kernel, extend_kernel, sum_kernel
from workers.kernels.triton_elementwise import add_norm_kernel, embed_kernel, gated_kernel, latent_kernel, rotate_kernel
from workers.kernels.triton_experts import expert_down_kernel, expert_gate_kernel
from workers.kernels.triton_packed import MXFP4, MXFP4_PAIRS
from workers.kernels.triton_products import product_kernel
from workers.kernels.triton_routing import combine_kernel, route_kernel, sort_kernel

DOCUMENT = Path(__file__).parents[3] / "docs" / "kernels.md"
BEGIN, END = "<!-- compiled -->\n", "<!-- end -->"
TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), 163),
    "sm_90": (GPUTarget("cuda", 90, 32), 227),
    "sm_100": (GPUTarget("cuda", 100, 32), 227),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64),
}
"""With the shared memory of a program, in KB."""
HOPPER = "sm_90"
TENSOR_CORES = ("tcgen05.mma", "wgmma.mma_async", "mma.sync", "v_mfma")
BATCH, CONTEXT = 64, 8192
"""Of the decode whose bytes are counted."""


@dataclass(frozen=True)
class Heads:
    """A model's heads on one rank."""

    heads: int
    kv_heads: int
    dim: int
    v_dim: int = 0
    """Latent attention: the values are the first part of the keys."""
    window: int = 0
    softcap: bool = False
    sinks: bool = False
    fp8: bool = False


HEADS = {
    "Llama 3.1 8B": Heads(32, 8, 128),
    "gpt-oss 20B, window": Heads(64, 8, 64, window=128, sinks=True),
    "Gemma 2 27B, window": Heads(32, 16, 128, window=4096, softcap=True),
    "Gemma 3 12B": Heads(16, 8, 256),
    "DeepSeek V3, TP 8": Heads(16, 1, 576, v_dim=512),
    "Llama 3.1 8B, fp8 KV": Heads(32, 8, 128, fp8=True),
    "DeepSeek V3, TP 8, fp8 KV": Heads(16, 1, 576, v_dim=512, fp8=True),
}
KERNELS = {"decode": decode_kernel, "extend": extend_kernel, "sum of splits": sum_kernel}
HEAD_OF_128 = {"DIM": 128, "V_DIM": 128, "ROPE": 128, "HALF": 64, "REST": 1, "PAGE": 16, "BLOCK": 128}
HEAD_OF_64 = {"DIM": 64, "V_DIM": 64, "ROPE": 64, "HALF": 32, "REST": 1, "PAGE": 0, "BLOCK": 64}
ROTATED = HEAD_OF_64 | {"HEADS": 16, "KV_HEADS": 0, "NORM": False}
PARTLY_ROTATED = HEAD_OF_128 | {"ROPE": 96, "REST": 32, "HEADS": 24, "KV_HEADS": 8, "NORM": False}
ELEMENTWISE: dict[str, tuple[Any, str, int, dict[str, Any]]] = {
    "add and norm": (
        add_norm_kernel,
        "Llama 3.1 8B",
        warps_of(4096),
        {"SIZE": 4096, "BLOCK": 4096, "ADD": True, "NORM": True},
    ),
    "norm, rotate, write": (rotate_kernel, "Qwen3 8B", 1, HEAD_OF_128 | {"HEADS": 32, "KV_HEADS": 8, "NORM": True}),
    "rotate": (rotate_kernel, "DeepSeek V3, TP 8", 1, ROTATED),
    "rotate a part, write": (rotate_kernel, "Phi-4-mini", 1, PARTLY_ROTATED),
    "norm, rotate, write fp8": (rotate_kernel, "Qwen3 8B", 1, HEAD_OF_128 | {"HEADS": 32, "KV_HEADS": 8, "NORM": True}),
    "write latents": (latent_kernel, "DeepSeek V3, TP 8", 4, {"RANK": 512, "ROPE": 64, "BLOCK": 512, "HALF": 32}),
    "embed": (
        embed_kernel,
        "Gemma 2 9B",
        warps_of(EMBED_BLOCK),
        {"SIZE": 3584, "BLOCK": EMBED_BLOCK, "SCALED": True},
    ),
    "activation": (
        gated_kernel,
        "Llama 3.1 8B",
        warps_of(GATED_BLOCK),
        {"SIZE": 14336, "BLOCK": GATED_BLOCK, "GELU": False},
    ),
}
"""Kernel, model, warps and constants."""
PRODUCTS = {
    "product, query, key and value": ("Llama 3.1 8B", 6144, 4096, 16),
    "product, attention's output": ("Llama 3.1 8B", 4096, 4096, 64),
    "product, gate and up": ("Llama 3.1 8B", 28_672, 4096, 4096),
    "product, attention's output, FP8": ("DeepSeek V3, TP 8", 7168, 2048, 64),
}
"""Model, columns, depth and rows."""
GPT_OSS = {"HIDDEN": 2880, "SIZE": 2880, "BIAS": True}
DEEPSEEK = {"HIDDEN": 7168, "SIZE": 256, "BIAS": False}
NONE = torch.zeros(0, 0)
PLAIN = format_of(NONE)
IN_MXFP4 = format_of(MXFP4Planes(NONE, NONE, 0))
IN_FP8 = format_of(FP8Weight(NONE, NONE, (128, 128)))
EXPERTS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "experts, gate and up": (expert_gate_kernel, "gpt-oss 20B", GPT_OSS | PLAIN | {"TOP_K": 4, "CLAMPED": True}),
    "experts, down": (expert_down_kernel, "gpt-oss 20B", GPT_OSS | PLAIN),
    "experts, gate and up, MXFP4": (
        expert_gate_kernel,
        "gpt-oss 20B",
        GPT_OSS | IN_MXFP4 | {"TOP_K": 4, "CLAMPED": True},
    ),
    "experts, down, MXFP4": (expert_down_kernel, "gpt-oss 20B", GPT_OSS | IN_MXFP4),
    "experts, gate and up, FP8": (
        expert_gate_kernel,
        "DeepSeek V3, TP 8",
        DEEPSEEK | IN_FP8 | {"TOP_K": 8, "CLAMPED": False},
    ),
    "experts, down, FP8": (expert_down_kernel, "DeepSeek V3, TP 8", DEEPSEEK | IN_FP8),
}
ROUTING: dict[str, tuple[Any, str, int, dict[str, Any]]] = {
    "choice of experts": (route_kernel, "gpt-oss 20B", 1, route_constants(RouterSpec(32, 4, "top_softmax"), False)),
    "choice of experts, groups": (
        route_kernel,
        "DeepSeek V3",
        1,
        route_constants(RouterSpec(256, 8, "sigmoid", True, 2.5, 8, 4, group_by_two=True), True),
    ),
    "sort by expert": (sort_kernel, "gpt-oss 20B", 4, {"HEIGHT": 16, "BLOCK": SORT_BLOCK}),
    "sum of experts": (combine_kernel, "gpt-oss 20B", 4, {"NUM_LOCAL": 32, "TOP_K": 4, "SIZE": 2880, "BLOCK": COLUMNS}),
}
"""Kernel, model, warps and constants."""
POINTERS = {
    **dict.fromkeys(("tables", "tiles", "spans"), "*i32"),
    "scales": "*u8",
    **dict.fromkeys(("part_values", "part_sums"), "*fp32"),
    **dict.fromkeys(("pages", "offsets", "order", "blocks", "ends", "tokens", "chosen"), "*i64"),
    **dict.fromkeys(("logits", "choice_bias"), "*fp32"),
    **dict.fromkeys(("weights", "outputs"), "*bf16"),
    **dict.fromkeys(("hidden", "bias", "share"), "*bf16"),
    **dict.fromkeys(
        ("out", "q", "k", "v", "k_pages", "v_pages", "sinks", "total", "x", "delta", "weight", "table"), "*bf16"
    ),
    **dict.fromkeys(("q_out", "cos", "sin", "q_weight", "k_weight", "latent", "k_rope", "gate_up"), "*bf16"),
}
FLOATS = ("scale", "softcap", "eps", "limit", "alpha", "k_factor", "v_factor")
BYTES = {"k_pages": "*u8", "v_pages": "*u8", "weight": "*u8", "scales": "*fp32"}
"""KV, or weights, in fp8."""


@dataclass
class Row:
    """What a compiler says of one kernel."""

    kernel: str
    heads: str
    target: str
    registers: int
    spilled_bytes: int
    shared_kb: float
    tensor_cores: str

    def __str__(self) -> str:
        limit = TARGETS[self.target][1]
        return (
            f"| {self.kernel} | {self.heads} | {self.target} | {self.registers} | {self.spilled_bytes} "
            f"| {self.shared_kb:.0f} of {limit} KB | {self.tensor_cores or '-'} |"
        )


def compiled(kernel: str, heads: str, target: str) -> Row:
    """Compile one kernel of bf16 queries and pages."""
    if kernel in ELEMENTWISE or kernel in ROUTING:
        source, _, num_warps, given = (ELEMENTWISE | ROUTING)[kernel]
        return _compiled(kernel, heads, target, source, given, {"num_warps": num_warps}, fp8=kernel.endswith("fp8"))
    if kernel in PRODUCTS:
        _, columns, depth, num_rows = PRODUCTS[kernel]
        tile = product_tile(columns, num_rows, target == HOPPER and not kernel.endswith("FP8"))
        given = {
            "BAND": BAND,
            "N": columns,
            "K": depth,
            "BLOCK_M": tile.rows,
            "BLOCK_N": tile.columns,
            "BLOCK_K": tile.depth,
        }
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        given |= {"w_k_stride": 1, "BIAS": False} | (IN_FP8 if kernel.endswith("FP8") else PLAIN)
        return _compiled(kernel, heads, target, product_kernel, given, options, fp8=kernel.endswith("FP8"))
    if kernel in EXPERTS:
        source, _, given = EXPERTS[kernel]
        packed = given["FORMAT"] == IN_MXFP4["FORMAT"]
        if packed and target.startswith("sm_"):
            given = given | {"FORMAT": MXFP4_PAIRS.value}
        num_rows = 8192 if packed else 64
        tile_ = expert_tile(num_rows, 32, packed, target == HOPPER and not kernel.endswith("FP8"))
        options = {"num_warps": tile_.num_warps, "num_stages": tile_.num_stages}
        given = given | {"BLOCK_M": tile_.rows, "BLOCK_N": tile_.columns, "BLOCK_K": tile_.depth}
        return _compiled(kernel, heads, target, source, given, options, fp8=kernel.endswith("FP8"))
    source, shape = KERNELS[kernel], HEADS[heads]
    tiles = attention_tiles(shape.v_dim or shape.dim, target == HOPPER)
    blocks = tiles.extend if kernel == "extend" else tiles.decode
    given = constants(
        blocks,
        heads=shape.heads,
        group=shape.heads // shape.kv_heads,
        k_dim=shape.dim,
        v_dim=shape.v_dim or shape.dim,
        page_size=16,
        window=shape.window,
        softcap=shape.softcap,
        sinks=shape.sinks,
        latent=bool(shape.v_dim),
    )
    options = {"num_warps": blocks.num_warps, "num_stages": blocks.num_stages}
    return _compiled(kernel, heads, target, source, given, options, fp8=shape.fp8)


def _compiled(
    kernel: str,
    heads: str,
    target: str,
    source: Any,
    given: dict[str, Any],
    options: dict[str, Any],
    *,
    fp8: bool = False,
) -> Row:
    pointers = POINTERS | BYTES if fp8 else POINTERS
    if given.get("FORMAT") in (MXFP4.value, MXFP4_PAIRS.value):
        pointers = pointers | {"weight": "*i16", "scales": "*i32"}
    if kernel == "rotate":  # nothing is written: what stands for pages is of any type
        pointers = pointers | {"pages": "*bf16", "offsets": "*bf16"}
    names: list[str] = source.arg_names
    constexprs = {(i,): given[name] for i, name in enumerate(names) if name in given}
    signature = {
        name: "constexpr" if name in given else pointers.get(name, "fp32" if name in FLOATS else "i32")
        for name in names
    }
    aligned = [["tt.divisibility", 16]]
    attributes = {
        (i,): aligned
        for i, name in enumerate(names)
        if name not in given and (name in POINTERS or name.endswith("stride"))
    }
    built = triton.compile(
        ASTSource(fn=source, signature=signature, constexprs=constexprs, attrs=attributes),
        target=TARGETS[target][0],
        options=options | {"enable_fp_fusion": False},
    )
    found = _nvidia(built, TARGETS[target][0]) if target.startswith("sm_") else _amd(built.asm["amdgcn"])
    return Row(kernel, heads, target, *found[:2], built.metadata.shared / 1024, found[2])


def _nvidia(built: Any, target: GPUTarget) -> tuple[int, int, str]:
    ptx = built.asm["ptx"]
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        name = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)[1]  # type: ignore[index]
        command = [get_ptxas(target.arch).path, "-v", f"--gpu-name={name}", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = int(re.search(r"Used (\d+) registers", said)[1])  # type: ignore[index]
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", said)))
    return registers, spilled, _instruction(ptx)


def _amd(assembly: str) -> tuple[int, int, str]:
    counts = {name: int(count) for name, count in re.findall(r"\.(\w+_count):\s*(\d+)", assembly)}
    return counts["vgpr_count"], 4 * counts["vgpr_spill_count"], _instruction(assembly)


def _instruction(assembly: str) -> str:
    return next((name for name in TENSOR_CORES if name in assembly), "")


def bytes_moved(heads: Heads) -> float:
    """Bytes of a decode over the least that it needs, counted from the launch grid: a tile reads its KV once."""
    blocks, group = attention_tiles(heads.v_dim or heads.dim, True).decode, heads.heads // heads.kv_heads
    tiles = -(-group // blocks.rows)
    attended = min(CONTEXT, heads.window or CONTEXT)
    kv = attended * heads.kv_heads * (heads.dim if heads.v_dim else 2 * heads.dim) * (1 if heads.fp8 else 2)
    ends = heads.heads * (heads.dim + (heads.v_dim or heads.dim)) * 2
    splits = (CONTEXT - 1) // blocks.split + 1 - max(0, CONTEXT - heads.window if heads.window else 0) // blocks.split
    parts = 2 * splits * heads.heads * ((heads.v_dim or heads.dim) + 2) * 4 if splits > 1 else 0
    tables = heads.kv_heads * attended // 16 * 4 * tiles
    return (tiles * kv + ends + parts + tables) / (kv + ends)


def rows(cases: Iterator[tuple[str, str, str]]) -> list[Row]:
    return [compiled(*case) for case in cases]


def every_case() -> Iterator[tuple[str, str, str]]:
    for kernel in KERNELS:
        for heads in HEADS:
            if kernel != "sum of splits" or not (HEADS[heads].window or HEADS[heads].fp8):
                yield from ((kernel, heads, target) for target in TARGETS)
    for kernel, (heads, *_) in PRODUCTS.items():
        yield from ((kernel, heads, target) for target in TARGETS)
    for kernel, (_, heads, *_) in (*ROUTING.items(), *EXPERTS.items(), *ELEMENTWISE.items()):
        yield from ((kernel, heads, target) for target in TARGETS)


def table(found: list[Row]) -> str:
    """The table of docs/kernels.md."""
    lines = [
        "| kernel | heads of | target | registers | spilled bytes | shared memory | tensor cores |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *map(str, found),
        "",
        f"| decode of {BATCH} x {CONTEXT} tokens | bytes moved over the least |",
        "| --- | --- |",
        *(f"| {name} | {bytes_moved(heads):.3f} |" for name, heads in HEADS.items()),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the document's table, or with cases as JSON, print their rows as JSON."""
    if len(sys.argv) > 1:
        cases = iter([tuple(case) for case in json.loads(sys.argv[1])])
        print(json.dumps([asdict(row) for row in rows(cases)]))
        return
    head, rest = DOCUMENT.read_text().split(BEGIN)
    DOCUMENT.write_text(head + BEGIN + table(rows(every_case())) + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
