"""The operations of a layer, recorded on a tape for the compiled kernels: what torch's do, in fewer passes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workers.kernels.cpu import ops
from workers.kernels.cpu.memory import HugePages
from workers.kernels.cpu.tape import KINDS, Tape, matrix, norm, page_table, pages
from workers.kernels.elementwise import HeadNorms, Places, Rotation
from workers.kernels.grouped_experts import ExpertProducts, RouterSpec
from workers.kernels.products import PanelWeight, Weight

ACTIVATIONS = {"silu": 0, "gelu_pytorch_tanh": 1, "clamped_swiglu": 2}
SCORES = {"top_softmax": 0, "softmax": 1, "sigmoid": 2}
INT8_MAX = 127


def _weight(weight: Weight) -> ops.Weight:
    assert isinstance(weight, PanelWeight)
    scales = None if weight.scales is None else weight.scales.data_ptr()
    return ops.Weight(weight.data.data_ptr(), scales, weight.rows, weight.depth, KINDS[weight.dtype])


def _address(tensor: Tensor | None, dtype: torch.dtype) -> int | None:
    if tensor is None:
        return None
    assert tensor.is_contiguous() and tensor.dtype is dtype, (tensor.stride(), tensor.dtype)
    return tensor.data_ptr()


class CpuProducts:
    """``Products`` on panels."""

    reads_packed = False

    def __init__(self, tape: Tape, quantization: str | None = None) -> None:
        self._tape, self._int8, self._memory = tape, quantization == "int8", HugePages()

    def prepare(self, weight: Tensor, *, layer: bool = True) -> PanelWeight:
        rows, depth = weight.shape[-2:]
        whole = weight.reshape(-1, rows, depth)
        scales = None
        if layer and self._int8:
            # One factor a row (its output channel): the largest becomes 127.
            scales = (whole.float().abs().amax(-1) / INT8_MAX).clamp(min=torch.finfo(torch.float32).tiny)
            whole = (whole.float() / scales[..., None]).round().to(torch.int8)
        elif whole.dtype is not torch.bfloat16:
            whole = whole.float()
        whole, library, kind = whole.contiguous(), self._tape.library, KINDS[whole.dtype]
        data = self._memory.empty(len(whole), library.holdfast_panel_bytes(rows, depth, kind))
        for one, packed in zip(whole, data, strict=True):
            library.holdfast_pack(one.data_ptr(), rows, depth, kind, packed.data_ptr())
        return PanelWeight(data, rows, depth, whole.dtype, scales)

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        return self._linear(x, weight, bias, self._tape.dtype)

    def logits(self, x: Tensor, weight: Weight) -> Tensor:
        return self._linear(x, weight, None, torch.float32)

    def scores(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        return self._linear(x, weight, bias, torch.float32)

    def _linear(self, x: Tensor, weight: Weight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        assert isinstance(weight, PanelWeight)
        out = self._tape.empty(len(x), weight.rows, dtype=dtype)
        self.linear_to(out, x, weight, bias)
        return out

    def linear_to(self, out: Tensor, x: Tensor, weight: Weight, bias: Tensor | None = None) -> ops.LinearOp:
        """``linear`` into ``out``, which the caller may exchange: fp32 or of the tape's precision."""
        return self._tape.add(
            ops.LinearOp,
            x,
            x=matrix(x),
            weight=_weight(weight),
            bias=_address(bias, self._tape.dtype),
            out=matrix(out),
            wide=out.dtype is torch.float32,
        )

    def by_head(self, x: Tensor, weight: Weight) -> Tensor:
        assert isinstance(weight, PanelWeight)
        out = self._tape.empty(*x.shape[:2], weight.rows)
        self._tape.add(
            ops.ByHeadOp,
            x,
            x=matrix(x),
            x_head=x.stride(1),
            weight=_weight(weight),
            heads=x.shape[1],
            out=matrix(out),
            out_head=weight.rows,
        )
        return out


class CpuElementwise:
    """``Elementwise``."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape

    def embed(self, tokens: Tensor, table: Weight, part: tuple[int, int] | None, scale: float) -> Tensor:
        assert isinstance(table, PanelWeight)
        first, end = part or (0, table.rows)
        out = self._tape.empty(len(tokens), table.depth)
        self._tape.add(
            ops.EmbedOp,
            tokens,
            tokens=tokens.data_ptr(),
            table=_weight(table),
            first=first,
            end=end,
            scale=scale,
            out=matrix(out),
        )
        return out

    def gather(self, x: Tensor, index: Tensor) -> Tensor:
        out = self._tape.empty(len(index), *x.shape[1:])
        width = x[0].numel()
        self._tape.add(ops.GatherOp, index, source=matrix(x), index=index.data_ptr(), width=width, out=matrix(out))
        return out

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self.add_norm(x, None, weight, eps)[0]

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
        total = x if delta is None else self._tape.empty(*x.shape)
        out = total if weight is None else self._tape.empty(*x.shape)
        self._add_norm(out, total, x, delta, weight, eps)
        return out, total

    def norm_both(self, x: Tensor, x_weight: Tensor, y: Tensor, y_weight: Tensor, eps: float) -> Tensor:
        width = x.shape[-1]
        out = self._tape.empty(len(x), 2 * width)
        self._add_norm(out.narrow(1, 0, width), x, x, None, x_weight, eps)
        self._add_norm(out.narrow(1, width, width), y, y, None, y_weight, eps)
        return out

    def _add_norm(
        self, out: Tensor, total: Tensor, x: Tensor, delta: Tensor | None, weight: Tensor | None, eps: float
    ) -> None:
        self._tape.add(
            ops.AddNormOp,
            x,
            x=matrix(x),
            delta=matrix(delta),
            out=matrix(None if weight is None else out),
            total=matrix(total),
            norm=norm(weight, self._tape.dtype),
            width=x.shape[-1],
            eps=eps,
        )

    def mean_squares(self, parts: tuple[Tensor, ...]) -> Tensor:
        out = self._tape.empty(len(parts[0]), len(parts), dtype=torch.float32)
        for part, column in zip(parts, out.unbind(1), strict=True):
            self._tape.add(ops.SquaresOp, part, x=matrix(part), width=part.shape[-1], out=matrix(column.unsqueeze(1)))
        return out

    def scaled_norm(self, x: Tensor, mean_squares: Tensor, ranks: int, weight: Tensor, eps: float) -> Tensor:
        out = self._tape.empty(*x.shape)
        self._tape.add(
            ops.ScaleNormOp,
            x,
            x=matrix(x),
            mean_squares=matrix(mean_squares.unsqueeze(1)),
            out=matrix(out),
            norm=norm(weight, self._tape.dtype),
            width=x.shape[-1],
            ranks=ranks,
            eps=eps,
        )
        return out

    def rotate(self, x: Tensor, rotation: Rotation, rest: Tensor | None = None) -> Tensor:
        tokens, heads, width = x.shape
        rest_width = 0 if rest is None else rest.shape[-1]
        out = self._tape.empty(tokens, heads, rest_width + width)
        self._tape.add(
            ops.RotateOp,
            x,
            x=matrix(x),
            rest=matrix(rest),
            cos=matrix(rotation.cos),
            sin=matrix(rotation.sin),
            out=matrix(out),
            heads=heads,
            width=width,
            x_head=x.stride(1),
            rest_width=rest_width,
            rest_head=0 if rest is None else rest.stride(1),
            rope_dim=rotation.cos.shape[-1],
        )
        return out

    def rotate_and_write(
        self, q: Tensor, k: Tensor, v: Tensor, norms: HeadNorms | None, rotation: Rotation, places: Places
    ) -> Tensor:
        out = self._tape.empty(*q.shape)
        dtype, width = self._tape.dtype, q.shape[-1]
        assert q.stride(1) == k.stride(1) == v.stride(1) == width
        self._tape.add(
            ops.RotateAndWriteOp,
            q,
            q=matrix(q),
            k=matrix(k),
            v=matrix(v),
            cos=matrix(rotation.cos),
            sin=matrix(rotation.sin),
            out=matrix(out),
            q_norm=norm(None if norms is None else norms.q, dtype),
            k_norm=norm(None if norms is None else norms.k, dtype),
            heads=q.shape[1],
            kv_heads=k.shape[1],
            width=width,
            rope_dim=rotation.cos.shape[-1],
            eps=norms.eps if norms else 0.0,
            pages=places.pages.data_ptr(),
            offsets=places.offsets.data_ptr(),
            k_pages=pages(places.k_pages),
            v_pages=pages(places.v_pages),
            k_scale=places.scales[0],
            v_scale=places.scales[1],
        )
        return out

    def write_latents(
        self, latent: Tensor, weight: Tensor, eps: float, k_rope: Tensor, rotation: Rotation, places: Places
    ) -> None:
        self._tape.add(
            ops.WriteLatentsOp,
            latent,
            latent=matrix(latent),
            k_rope=matrix(k_rope),
            cos=matrix(rotation.cos),
            sin=matrix(rotation.sin),
            norm=norm(weight, self._tape.dtype),
            rank=latent.shape[-1],
            rope_dim=k_rope.shape[-1],
            eps=eps,
            pages=places.pages.data_ptr(),
            offsets=places.offsets.data_ptr(),
            k_pages=pages(places.k_pages),
            scale=1.0,
        )

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        width = gate_up.shape[-1] // 2
        out = self._tape.empty(len(gate_up), width)
        self._tape.add(
            ops.GatedOp,
            gate_up,
            gate_up=matrix(gate_up),
            width=width,
            activation=ACTIVATIONS[activation],
            out=matrix(out),
        )
        return out

    def add_gated(self, x: Tensor, shared: Tensor, gate: Tensor | None) -> Tensor:
        out = self._tape.empty(*x.shape)
        self._tape.add(
            ops.AddGatedOp,
            x,
            x=matrix(x),
            shared=matrix(shared),
            gate=matrix(gate),
            out=matrix(out),
            width=x.shape[-1],
        )
        return out


class CpuExperts:
    """``Experts``."""

    reads_packed = False

    def __init__(self, tape: Tape) -> None:
        self._tape = tape

    def route(
        self, logits: Tensor, choice_bias: Tensor | None, spec: RouterSpec, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        chosen = self._tape.empty(len(logits), spec.top_k, dtype=torch.int32)
        weights = self._tape.empty(len(logits), spec.top_k, dtype=torch.float32)
        router = ops.Router(
            score=SCORES[spec.score],
            num_experts=spec.num_experts,
            top_k=spec.top_k,
            num_groups=spec.num_groups,
            top_groups=spec.top_groups,
            group_by_two=spec.group_by_two,
            normalize=spec.normalize,
            scale=spec.scale,
        )
        self._tape.add(
            ops.RouteOp,
            logits,
            logits=matrix(logits),
            choice_bias=_address(choice_bias, torch.float32),
            router=router,
            chosen=chosen.data_ptr(),
            weights=weights.data_ptr(),
        )
        return chosen, weights

    def run(self, x: Tensor, chosen: Tensor, weights: Tensor, w: ExpertProducts) -> Tensor:
        out = self._tape.empty(*x.shape)
        experts = ops.Experts(
            gate_up=_weight(w.gate_up),
            down=_weight(w.down),
            num=len(w.gate_up),
            first=w.first,
            top_k=chosen.shape[1],
            activation=ACTIVATIONS["clamped_swiglu" if w.clamped else "silu"],
            limit=w.limit,
            alpha=w.alpha,
        )
        self._tape.add(
            ops.ExpertsOp,
            x,
            experts=experts,
            gate_up_bias=_address(w.gate_up_bias, self._tape.dtype),
            down_bias=_address(w.down_bias, self._tape.dtype),
            x=matrix(x),
            chosen=chosen.data_ptr(),
            weights=weights.data_ptr(),
            out=matrix(out),
        )
        return out


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """Attention over a KV group's page tables, in place: the same for every step."""

    tape: Tape
    tables: Tensor
    """int32 ``[sessions, max_pages]``: all of a rank's."""
    page_size: int
    window: int

    def attend(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor | None,
        scale: float,
        *,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        v_dim: int = 0,
        v_scale: float = 1.0,
    ) -> Tensor:
        """See ``AttentionPlan``."""
        tokens, heads, k_dim = q.shape
        v_dim = v_dim if v_pages is None else v_pages.shape[-1]
        out = self.tape.empty(tokens, heads, v_dim)
        attention = ops.Attention(
            table=page_table(self.tables, self.page_size),
            k=pages(k_pages),
            v=pages(v_pages),
            heads=heads,
            kv_heads=k_pages.shape[1],
            k_dim=k_dim,
            v_dim=v_dim,
            window=self.window,
            scale=scale,
            softcap=softcap,
            v_scale=v_scale,
        )
        assert q.stride(1) == k_dim
        sink = _address(sinks, self.tape.dtype)
        self.tape.add(ops.AttendOp, q, attention=attention, q=matrix(q), sinks=sink, out=matrix(out))
        return out
