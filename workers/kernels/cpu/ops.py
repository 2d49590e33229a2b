"""The operations of a tape, as ``ops.h`` has them: the same fields in the same order, explained there."""

from __future__ import annotations

from ctypes import Structure, c_bool, c_double, c_float, c_int32, c_int64, c_void_p


class Matrix(Structure):
    _fields_ = [("data", c_void_p), ("stride", c_int64)]


class Norm(Structure):
    _fields_ = [("weight", c_void_p), ("wide", c_int64)]


class Weight(Structure):
    _fields_ = [("data", c_void_p), ("scales", c_void_p), ("rows", c_int64), ("depth", c_int64), ("kind", c_int32)]


class PageTable(Structure):
    _fields_ = [("entries", c_void_p), ("stride", c_int64), ("page_size", c_int64)]


class Pages(Structure):
    _fields_ = [("data", c_void_p), ("page_stride", c_int64), ("head_stride", c_int64), ("kind", c_int32)]


class Attention(Structure):
    _fields_ = [
        ("table", PageTable),
        ("k", Pages),
        ("v", Pages),
        *((name, c_int64) for name in ("heads", "kv_heads", "k_dim", "v_dim", "window")),
        *((name, c_float) for name in ("scale", "softcap", "v_scale")),
    ]


class Experts(Structure):
    _fields_ = [
        ("gate_up", Weight),
        ("down", Weight),
        *((name, c_int64) for name in ("num", "first", "top_k")),
        ("activation", c_int32),
        ("limit", c_float),
        ("alpha", c_float),
    ]


class Router(Structure):
    _fields_ = [
        ("score", c_int32),
        *((name, c_int64) for name in ("num_experts", "top_k", "num_groups", "top_groups")),
        ("group_by_two", c_bool),
        ("normalize", c_bool),
        ("scale", c_float),
    ]


class Op(Structure):
    """``code``: its place in ``OPS``. Its rows are the step's tokens, or its samples."""

    _fields_ = [("code", c_int32), ("of_samples", c_int32)]


def _matrices(*names: str) -> list[tuple[str, type[Structure]]]:
    return [(name, Matrix) for name in names]


class PrepareOp(Op):
    _fields_ = [
        *((name, c_void_p) for name in ("tokens", "positions", "offsets", "logit_rows")),
        ("page_size", c_int64),
    ]


class PagesOp(Op):
    _fields_ = [("table", PageTable), ("pages", c_void_p)]


class EmbedOp(Op):
    _fields_ = [
        ("tokens", c_void_p),
        ("table", Weight),
        ("first", c_int64),
        ("end", c_int64),
        ("scale", c_double),
        ("out", Matrix),
    ]


class GatherOp(Op):
    _fields_ = [("source", Matrix), ("index", c_void_p), ("width", c_int64), ("out", Matrix)]


class AddNormOp(Op):
    _fields_ = [*_matrices("x", "delta", "out", "total"), ("norm", Norm), ("width", c_int64), ("eps", c_double)]


class SquaresOp(Op):
    _fields_ = [("x", Matrix), ("width", c_int64), ("out", Matrix)]


class ScaleNormOp(Op):
    _fields_ = [
        *_matrices("x", "mean_squares", "out"),
        ("norm", Norm),
        ("width", c_int64),
        ("ranks", c_int64),
        ("eps", c_double),
    ]


class LinearOp(Op):
    _fields_ = [("x", Matrix), ("weight", Weight), ("bias", c_void_p), ("out", Matrix), ("wide", c_int64)]


class ByHeadOp(Op):
    _fields_ = [
        ("x", Matrix),
        ("x_head", c_int64),
        ("weight", Weight),
        ("heads", c_int64),
        ("out", Matrix),
        ("out_head", c_int64),
    ]


class RotateOp(Op):
    _fields_ = [
        *_matrices("x", "rest", "cos", "sin", "out"),
        *((name, c_int64) for name in ("heads", "width", "x_head", "rest_width", "rest_head", "rope_dim")),
    ]


class RotateAndWriteOp(Op):
    _fields_ = [
        *_matrices("q", "k", "v", "cos", "sin", "out"),
        ("q_norm", Norm),
        ("k_norm", Norm),
        *((name, c_int64) for name in ("heads", "kv_heads", "width", "rope_dim")),
        ("eps", c_double),
        ("pages", c_void_p),
        ("offsets", c_void_p),
        ("k_pages", Pages),
        ("v_pages", Pages),
        ("k_scale", c_double),
        ("v_scale", c_double),
    ]


class WriteLatentsOp(Op):
    _fields_ = [
        *_matrices("latent", "k_rope", "cos", "sin"),
        ("norm", Norm),
        ("rank", c_int64),
        ("rope_dim", c_int64),
        ("eps", c_double),
        ("pages", c_void_p),
        ("offsets", c_void_p),
        ("k_pages", Pages),
        ("scale", c_double),
    ]


class AttendOp(Op):
    _fields_ = [("attention", Attention), ("q", Matrix), ("sinks", c_void_p), ("out", Matrix)]


class GatedOp(Op):
    _fields_ = [("gate_up", Matrix), ("width", c_int64), ("activation", c_int32), ("unused", c_int32), ("out", Matrix)]


class RouteOp(Op):
    _fields_ = [
        ("logits", Matrix),
        ("choice_bias", c_void_p),
        ("router", Router),
        ("chosen", c_void_p),
        ("weights", c_void_p),
    ]


class ExpertsOp(Op):
    _fields_ = [
        ("experts", Experts),
        ("gate_up_bias", c_void_p),
        ("down_bias", c_void_p),
        ("x", Matrix),
        ("chosen", c_void_p),
        ("weights", c_void_p),
        ("out", Matrix),
    ]


class AddGatedOp(Op):
    _fields_ = [*_matrices("x", "shared", "gate", "out"), ("width", c_int64)]


OPS: tuple[type[Op], ...] = (
    PrepareOp,
    PagesOp,
    EmbedOp,
    GatherOp,
    AddNormOp,
    SquaresOp,
    ScaleNormOp,
    LinearOp,
    ByHeadOp,
    RotateOp,
    RotateAndWriteOp,
    WriteLatentsOp,
    AttendOp,
    GatedOp,
    RouteOp,
    ExpertsOp,
    AddGatedOp,
)
