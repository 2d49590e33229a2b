"""Load a checkpoint folder: this rank's part of each weight."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from workers.kernels.backend import TORCH, Backend
from workers.kernels.packed import FP8Weight, PackedWeight, concatenated
from workers.kernels.products import Weight
from workers.models.decoder import Decoder, DecoderWeights, LayerWeights
from workers.models.feed_forward import ExpertsWeights, MLPWeights
from workers.models.mixers import AttentionWeights, LatentWeights
from workers.models.parallel import RankGroup, Shard
from workers.models.spec import (
    AttentionSpec,
    ExpertsSpec,
    LatentSpec,
    LayerSpec,
    MLPSpec,
    ModelConfig,
    QKNorm,
)
from workers.models.tensors import Part, Tensors, weight_files
from workers.progress import tell_progress


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """A layout's names below a layer: the block, the router, and each expert's projections."""

    block: str
    router: str
    gate: str = "experts.{}.gate_proj"
    up: str = "experts.{}.up_proj"
    down: str = "experts.{}.down_proj"
    shared: str = ""


EXPERT_NAMES = {
    "mixtral": ExpertNames("block_sparse_moe", "gate", "experts.{}.w1", "experts.{}.w3", "experts.{}.w2"),
    "qwen": ExpertNames("mlp", "gate", shared="shared_expert"),
    "deepseek": ExpertNames("mlp", "gate", shared="shared_experts"),
    "gpt_oss": ExpertNames("mlp", "router"),
}


_Projections: TypeAlias = tuple[Tensor | PackedWeight, Tensor | None, Tensor | PackedWeight, Tensor | None]
"""Experts' gate and up, their bias, their down, its bias."""


def load_decoder(
    folder: Path,
    config: ModelConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    context_len: int,
    weight_dtype: torch.dtype | None = None,
    group: RankGroup | None = None,
    expert_parallel: bool = False,
    kernels: Backend = TORCH,
) -> Decoder:
    """Load a Hugging Face checkpoint folder to ``device`` in ``dtype``; in a group, this rank's shard.

    ``weight_dtype``: of matrices, where the kernels multiply them with activations of another precision.
    ``expert_parallel``: the ranks divide the experts among them, not each expert's width.

    Raises UnsupportedModel for pickled weights, for sizes that do not divide by the group's ranks, and for
    missing, unknown or misshapen tensors, which it names.
    """
    shard = replace(group.shard if group is not None else Shard(), by_expert=expert_parallel)
    part = config.shard(shard)
    with ExitStack() as stack:
        tensors = Tensors(weight_files(folder), stack, device, dtype, config.fp8_block)
        weights = Loader(tensors, config, part, shard, weight_dtype or dtype, kernels).decoder()
        tensors.refuse_unused(
            tied=config.tie_embeddings, num_layers=len(config.layers), num_extra_layers=config.num_extra_layers
        )
    return Decoder(part, weights, context_len, device=device, dtype=dtype, group=group, kernels=kernels)


class Loader:
    """``whole`` is the model, ``part`` this rank's shard of it: layer by layer the same kinds of parts."""

    def __init__(
        self,
        tensors: Tensors,
        whole: ModelConfig,
        part: ModelConfig,
        shard: Shard,
        dtype: torch.dtype,
        kernels: Backend,
    ) -> None:
        """``dtype``: of matrices."""
        self.tensors, self._whole, self._part, self._shard = tensors, whole, part, shard
        self._dtype, self._prepare = dtype, kernels.products.prepare
        self._packs_experts, self._packs_matrices = kernels.experts.reads_packed, kernels.products.reads_packed
        self._hidden = whole.hidden_size

    def decoder(self) -> DecoderWeights:
        table = self.vocabulary("model.embed_tokens.weight")
        layers: list[LayerWeights] = []
        for whole, part in zip(self._whole.layers, self._part.layers, strict=True):
            layers.append(self.layer(f"model.layers.{len(layers)}", whole, part))
            tell_progress("loads layers", len(layers), len(self._whole.layers))
        head = table if self._whole.tie_embeddings else self.vocabulary("lm_head.weight")
        return DecoderWeights(table, layers, self.norm("model.norm", self._hidden), head)

    def layer(self, name: str, whole: LayerSpec, part: LayerSpec) -> LayerWeights:
        if isinstance(whole.mixer, LatentSpec):
            mixer: AttentionWeights | LatentWeights = self._latent(f"{name}.self_attn", whole.mixer)
        else:
            assert isinstance(part.mixer, AttentionSpec)
            mixer = self._attention(f"{name}.self_attn", whole.mixer, part.mixer)
        if isinstance(whole.feed_forward, ExpertsSpec):
            assert isinstance(part.feed_forward, ExpertsSpec)
            feed_forward: MLPWeights | ExpertsWeights = self._experts(name, whole.feed_forward, part.feed_forward)
        else:
            feed_forward = self._mlp(f"{name}.mlp", whole.feed_forward)
        before_mixer, after_mixer, before_feed_forward, after_feed_forward = (
            self.norm(f"{name}.{norm}", self._hidden) if norm else None for norm in whole.norms
        )
        return LayerWeights(before_mixer, after_mixer, before_feed_forward, after_feed_forward, mixer, feed_forward)

    # ---- mixers ------------------------------------------------------------------------------------

    def _attention(self, name: str, whole: AttentionSpec, part: AttentionSpec) -> AttentionWeights:
        dim, shard = whole.head_dim, self._shard
        q_size, kv_size = whole.num_heads * dim, whole.num_kv_heads * dim
        q = shard.of(q_size)
        # With more ranks than KV heads, neighbouring ranks hold the KV head of their query heads.
        kv_head = shard.rank * whole.num_kv_heads // shard.size
        kv = (kv_head * dim, (kv_head + part.num_kv_heads) * dim)
        qkv = [
            (f"{name}.{p}_proj", n, mine) for p, n, mine in (("q", q_size, q), ("k", kv_size, kv), ("v", kv_size, kv))
        ]
        norms: list[Tensor | None] = [None, None]
        if whole.qk_norm is QKNorm.HEAD:
            norms = [self.norm(f"{name}.{p}_norm", dim) for p in "qk"]
        elif whole.qk_norm is QKNorm.ALL:
            norms = [self.norm(f"{name}.{p}_norm", n, mine) for p, n, mine in (("q", q_size, q), ("k", kv_size, kv))]
        heads = (shard.rank * part.num_heads, (shard.rank + 1) * part.num_heads)
        return AttentionWeights(
            qkv=self._fused_qkv(name, q_size, kv_size, q, kv)
            if whole.fused_qkv
            else self._stack([(f"{p}.weight", n, mine) for p, n, mine in qkv], whole.num_inputs * self._hidden),
            qkv_bias=self.tensors.stack([(f"{p}.bias", n, mine) for p, n, mine in qkv]) if whole.qkv_bias else None,
            q_norm=norms[0],
            k_norm=norms[1],
            sinks=self.tensors.take(f"{name}.sinks", whole.num_heads, part=heads) if whole.sinks else None,
            o=self.matrix(f"{name}.o_proj.weight", self._hidden, q_size, dim=1, part=q),
            o_bias=self._row_bias(f"{name}.o_proj.bias", whole.o_bias),
            kv_scales=(self.tensors.scalar(f"{name}.k_scale", 1.0), self.tensors.scalar(f"{name}.v_scale", 1.0)),
        )

    def _fused_qkv(self, name: str, q_size: int, kv_size: int, q: Part, kv: Part) -> Weight:
        rows = self.tensors.take(f"{name}.qkv_proj.weight", q_size + 2 * kv_size, self._hidden, dtype=self._dtype)
        whole = rows.split((q_size, kv_size, kv_size))
        return self._prepare(torch.cat([tensor[slice(*mine)] for tensor, mine in zip(whole, (q, kv, kv), strict=True)]))

    def _latent(self, name: str, spec: LatentSpec) -> LatentWeights:
        t, hidden, heads = self.tensors, self._hidden, spec.num_heads
        first, end = self._shard.of(heads)
        q_dim, kv_dim = spec.nope_dim + spec.rope.dim, spec.nope_dim + spec.v_dim
        q_name, q_in = ("q_b_proj", spec.q_rank) if spec.q_rank else ("q_proj", hidden)
        dtype = self._dtype
        q_b = t.take(f"{name}.{q_name}.weight", heads * q_dim, q_in, part=(first * q_dim, end * q_dim), dtype=dtype)
        kv_a = t.take(f"{name}.kv_a_proj_with_mqa.weight", spec.latent_dim, hidden, dtype=dtype)
        kv_a_bias = t.take(f"{name}.kv_a_proj_with_mqa.bias", spec.latent_dim) if spec.bias else None
        kv_part = (first * kv_dim, end * kv_dim)
        kv_b = t.take(f"{name}.kv_b_proj.weight", heads * kv_dim, spec.kv_rank, part=kv_part, dtype=dtype)
        key, value = kv_b.view(end - first, kv_dim, spec.kv_rank).split((spec.nope_dim, spec.v_dim), dim=1)
        if spec.interleaved:
            q_b = _halves(q_b.view(end - first, q_dim, q_in), spec.rope.dim).reshape(-1, q_in)
            kv_a = _halves(kv_a, spec.rope.dim)
            kv_a_bias = None if kv_a_bias is None else _halves(kv_a_bias[:, None], spec.rope.dim)[:, 0]
        v_part = (first * spec.v_dim, end * spec.v_dim)
        return LatentWeights(
            q_a=self.matrix(f"{name}.q_a_proj.weight", spec.q_rank, hidden) if spec.q_rank else None,
            q_a_bias=t.take(f"{name}.q_a_proj.bias", spec.q_rank) if spec.q_rank and spec.bias else None,
            q_a_norm=self.norm(f"{name}.q_a_layernorm", spec.q_rank) if spec.q_rank else None,
            q_b=self._prepare(q_b),
            kv_a=self._prepare(kv_a),
            kv_a_bias=kv_a_bias,
            kv_a_norm=self.norm(f"{name}.kv_a_layernorm", spec.kv_rank),
            key=self._prepare(key.transpose(1, 2).contiguous()),
            value=self._prepare(value.contiguous()),
            o=self.matrix(f"{name}.o_proj.weight", hidden, heads * spec.v_dim, dim=1, part=v_part),
            o_bias=self._row_bias(f"{name}.o_proj.bias", spec.bias),
        )

    # ---- feed-forward parts ------------------------------------------------------------------------

    def _mlp(self, name: str, spec: MLPSpec) -> MLPWeights:
        t, size, mine = self.tensors, spec.size, self._shard.of(spec.size)
        gate_up = [(f"{name}.{p}_proj", size, mine) for p in ("gate", "up")]
        if spec.fused_gate_up:
            whole = t.take(f"{name}.gate_up_proj.weight", 2 * size, self._hidden, dtype=self._dtype)
            gate, up = whole.chunk(2)
            both = self._prepare(torch.cat((gate[slice(*mine)], up[slice(*mine)])))
        else:
            both = self._stack([(f"{p}.weight", n, part) for p, n, part in gate_up], self._hidden)
        return MLPWeights(
            gate_up=both,
            gate_up_bias=t.stack([(f"{p}.bias", n, part) for p, n, part in gate_up]) if spec.bias else None,
            down=self.matrix(f"{name}.down_proj.weight", self._hidden, size, dim=1, part=mine),
            down_bias=self._row_bias(f"{name}.down_proj.bias", spec.bias),
        )

    def _experts(self, layer: str, whole: ExpertsSpec, part: ExpertsSpec) -> ExpertsWeights:
        t, names, router = self.tensors, EXPERT_NAMES[whole.layout], whole.router
        block = f"{layer}.{names.block}"
        load = self._gpt_oss_experts if whole.layout == "gpt_oss" else self._separate_experts
        gate_up, gate_up_bias, down, down_bias = load(block, names, whole, part)
        shared = self._mlp(f"{block}.{names.shared}", whole.shared) if whole.shared is not None else None
        gate_name, bias_name = f"{block}.{names.shared}_gate.weight", f"{block}.{names.router}.e_score_correction_bias"
        return ExpertsWeights(
            router=self.matrix(f"{block}.{names.router}.weight", router.num_experts, self._hidden, layer=False),
            router_bias=t.take(f"{block}.{names.router}.bias", router.num_experts) if router.bias else None,
            choice_bias=t.take(bias_name, router.num_experts, dtype=torch.float32) if router.choice_bias else None,
            gate_up=self._prepare(gate_up) if isinstance(gate_up, Tensor) else gate_up,
            gate_up_bias=gate_up_bias,
            down=self._prepare(down) if isinstance(down, Tensor) else down,
            down_bias=down_bias,
            shared=shared,
            shared_gate=self.matrix(gate_name, 1, self._hidden, layer=False) if whole.shared_gate else None,
        )

    def _separate_experts(self, block: str, names: ExpertNames, whole: ExpertsSpec, part: ExpertsSpec) -> _Projections:
        """Experts with a tensor for each projection; this rank's, or its share of each."""
        t, hidden, size, mine = self.tensors, self._hidden, whole.size, self._width(whole)
        for expert in set(range(whole.router.num_experts)) - set(self._local(whole, part)):
            t.skip(f"{block}.experts.{expert}.")
        if self._packs_experts and (packed := self._packed_experts(block, names, whole, part)) is not None:
            return packed
        gate_up, down = [], []
        for expert in self._local(whole, part):
            gate, up, out = (f"{block}.{name.format(expert)}.weight" for name in (names.gate, names.up, names.down))
            gate_up.append(t.stack([(gate, size, mine), (up, size, mine)], hidden, dtype=self._dtype))
            down.append(t.take(out, hidden, size, dim=1, part=mine, dtype=self._dtype))
        return torch.stack(gate_up), None, torch.stack(down), None

    def _packed_experts(
        self, block: str, names: ExpertNames, whole: ExpertsSpec, part: ExpertsSpec
    ) -> _Projections | None:
        """Experts as they are stored, in FP8 blocks; None if they are not, or the ranks' shares cut blocks."""
        hidden, size, mine = self._hidden, whole.size, self._width(whole)
        gate_ups, downs = [], []
        for expert in self._local(whole, part):
            gate, up, out = (f"{block}.{name.format(expert)}.weight" for name in (names.gate, names.up, names.down))
            gate_up = self._packed([(gate, size, mine), (up, size, mine)], hidden)
            down = self._packed([(out, hidden, None)], size, mine)
            if gate_up is None or down is None:
                return None
            gate_ups.append(gate_up)
            downs.append(down)
        every_gate_up, every_down = concatenated(gate_ups, 0), concatenated(downs, 0)
        assert every_gate_up is not None and every_down is not None, "matrices end where they end"
        return every_gate_up, None, every_down, None

    def _gpt_oss_experts(self, block: str, names: ExpertNames, whole: ExpertsSpec, part: ExpertsSpec) -> _Projections:
        """All experts in one tensor, their gates and ups interleaved, in MXFP4 or as they are."""
        t, hidden, size, num = self.tensors, self._hidden, whole.size, whole.router.num_experts
        name, mine = f"{block}.experts", slice(*self._width(whole))
        local = slice(part.first, part.first + (part.num_local or num))
        both: Tensor | PackedWeight
        down: Tensor | PackedWeight
        if t.has(f"{name}.gate_up_proj_blocks"):
            both, down = self._mxfp4_experts(name, whole, local)
        else:
            gate_up = t.take(f"{name}.gate_up_proj", num, hidden, 2 * size, dtype=self._dtype).transpose(1, 2)
            both = torch.cat((gate_up[local, ::2][:, mine], gate_up[local, 1::2][:, mine]), dim=1).contiguous()
            down = t.take(f"{name}.down_proj", num, size, hidden, dtype=self._dtype).transpose(1, 2)[local, :, mine]
            down = down.contiguous()
        bias = t.take(f"{name}.gate_up_proj_bias", num, 2 * size)
        down_bias = t.take(f"{name}.down_proj_bias", num, hidden)
        both_bias = torch.cat((bias[local, ::2][:, mine], bias[local, 1::2][:, mine]), dim=1)
        adds_bias = self._shard.by_expert or self._shard.rank == 0
        return both, both_bias, down, down_bias[local] if adds_bias else None

    def _mxfp4_experts(
        self, name: str, whole: ExpertsSpec, local: slice
    ) -> tuple[Tensor | PackedWeight, Tensor | PackedWeight]:
        """As they are stored, where the kernels read them so and this rank's share cuts no group."""
        t, hidden, size, num, every = self.tensors, self._hidden, whole.size, whole.router.num_experts, slice(None)
        first, end = self._width(whole)
        gate_up = t.take_mxfp4(f"{name}.gate_up_proj", num, 2 * size, hidden)
        down = t.take_mxfp4(f"{name}.down_proj", num, hidden, size)
        halves = [gate_up.part(local, slice(2 * first + n, 2 * end, 2), every) for n in (0, 1)]
        both = concatenated([half for half in halves if half is not None], 1)
        mine = down.part(local, every, slice(first, end))
        assert both is not None, "MXFP4 has no blocks of rows"
        if self._packs_experts and mine is not None:
            both_packed, mine_packed = both.planes(t.device), mine.planes(t.device)
            if both_packed is not None and mine_packed is not None:
                return both_packed, mine_packed
        wide = replace(down, blocks=down.blocks[local], scales=down.scales[local]).dequantized(self._dtype)
        return both.dequantized(self._dtype).to(t.device), wide[..., first:end].contiguous().to(t.device)

    def _width(self, spec: ExpertsSpec) -> Part:
        """This rank's share of each expert's width."""
        return (0, spec.size) if self._shard.by_expert else self._shard.of(spec.size)

    def _local(self, whole: ExpertsSpec, part: ExpertsSpec) -> range:
        return range(part.first, part.first + (part.num_local or whole.router.num_experts))

    # ---- shared ------------------------------------------------------------------------------------

    def norm(self, name: str, size: int, part: Part | None = None) -> Tensor:
        if self._whole.norm_adds_one:
            return self.tensors.take(f"{name}.weight", size, part=part, dtype=torch.float32) + 1.0
        return self.tensors.take(f"{name}.weight", size, part=part)

    def _row_bias(self, name: str, present: bool) -> Tensor | None:
        # A row-parallel product is summed over the ranks, so only one of them adds the bias.
        bias = self.tensors.take(name, self._hidden) if present else None
        return bias if self._shard.rank == 0 else None

    def matrix(self, name: str, *shape: int, dim: int = 0, part: Part | None = None, layer: bool = True) -> Weight:
        if layer and self._packs_matrices:
            rows, columns = (part if dim == i else None for i in (0, 1))
            if (packed := self._packed([(name, shape[0], rows)], shape[1], columns)) is not None:
                return packed
        return self._prepare(self.tensors.take(name, *shape, dim=dim, part=part, dtype=self._dtype), layer=layer)

    def _stack(self, parts: list[tuple[str, int, Part]], *shape: int) -> Weight:
        if shape and self._packs_matrices and (packed := self._packed(parts, shape[0])) is not None:
            return packed
        return self._prepare(self.tensors.stack(parts, *shape, dtype=self._dtype))

    def _packed(
        self, parts: Sequence[tuple[str, int, Part | None]], depth: int, columns: Part | None = None
    ) -> FP8Weight | None:
        """Parts of matrices after one another, as they are stored in FP8 blocks; None if not, or one cuts a block."""
        every, found = slice(None), []
        for name, num_rows, rows in parts:
            stored = self.tensors.take_fp8(name, num_rows, depth)
            if stored is None:
                return None
            found.append(stored.part(every, slice(*rows) if rows else every, slice(*columns) if columns else every))
        whole = [part for part in found if part is not None]
        packed = concatenated(whole, 1) if len(whole) == len(found) else None
        return packed.to(self.tensors.device) if packed is not None else None

    def vocabulary(self, name: str) -> Weight:
        """This rank's rows of a ``[vocab_size, hidden]`` table, padded with zeros to equal shares."""
        total, shard = self._whole.vocab_size, self._shard
        start, end = shard.of(total)
        rows = self.tensors.take(name, total, self._hidden, part=(start, end), dtype=self._dtype)
        return self._prepare(pad(rows, (0, 0, 0, -(-total // shard.size) - (end - start))), layer=False)


def _halves(weight: Tensor, rope_dim: int) -> Tensor:
    """Rows whose last ``rope_dim`` (of the next to last dimension) were interleaved, with their halves one after
    the other: the rotary embedding then rotates halves, as everywhere else."""
    rest, turned = weight.split((weight.shape[-2] - rope_dim, rope_dim), dim=-2)
    return torch.cat((rest, turned[..., ::2, :], turned[..., 1::2, :]), dim=-2)
