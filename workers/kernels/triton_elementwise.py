"""The operations between a layer's products in Triton, a program a row: see ``elementwise``."""

from __future__ import annotations

import triton
import triton.language as tl

from workers.kernels.triton_fp8 import as_stored


@triton.jit
def add_norm_kernel(
    out,
    total,
    x,
    delta,
    weight,
    eps,
    x_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
):
    """Program (row): add, and normalize what the sum is in its own precision."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    there = i < SIZE
    values = tl.load(x + row * x_stride + i, mask=there, other=0.0)
    if ADD:
        other = tl.load(delta + row * SIZE + i, mask=there, other=0.0)
        values = (values.to(tl.float32) + other.to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + row * SIZE + i, values, mask=there)
    if NORM:
        exact = values.to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(exact * exact, 0) / SIZE + eps)
        weights = tl.load(weight + i, mask=there, other=0.0).to(tl.float32)
        tl.store(out + row * SIZE + i, (exact * scale * weights).to(out.dtype.element_ty), mask=there)


@triton.jit
def _rotate_head(
    to,
    like,
    factor,
    head,
    weight,
    eps,
    cos,
    sin,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    NORM: tl.constexpr,
):
    """Normalize a head in fp32, rotate its first ROPE elements by their halves, and store it as ``like`` has it.

    Each element is loaded once. HALF and REST: powers of two, of a half and of what is not rotated.
    """
    half: tl.constexpr = ROPE // 2
    i = tl.arange(0, HALF)
    turns = i < half
    x = tl.load(head + i, mask=turns, other=0.0).to(tl.float32)
    y = tl.load(head + half + i, mask=turns, other=0.0).to(tl.float32)
    if DIM > ROPE:
        j = tl.arange(0, REST)
        passes = j < DIM - ROPE
        rest = tl.load(head + ROPE + j, mask=passes, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(x * x + y * y, 0)
        if DIM > ROPE:
            squares += tl.sum(rest * rest, 0)
        scale = 1.0 / tl.sqrt(squares / DIM + eps)
        x = x * scale * tl.load(weight + i, mask=turns, other=0.0).to(tl.float32)
        y = y * scale * tl.load(weight + half + i, mask=turns, other=0.0).to(tl.float32)
        if DIM > ROPE:
            rest = rest * scale * tl.load(weight + ROPE + j, mask=passes, other=0.0).to(tl.float32)
    c = tl.load(cos + i, mask=turns, other=1.0).to(tl.float32)
    s = tl.load(sin + i, mask=turns, other=0.0).to(tl.float32)
    tl.store(to + i, as_stored(x * c - y * s, like, factor), mask=turns)
    c = tl.load(cos + half + i, mask=turns, other=1.0).to(tl.float32)
    s = tl.load(sin + half + i, mask=turns, other=0.0).to(tl.float32)
    tl.store(to + half + i, as_stored(y * c + x * s, like, factor), mask=turns)
    if DIM > ROPE:
        tl.store(to + ROPE + j, as_stored(rest, like, factor), mask=passes)


@triton.jit
def rotate_kernel(
    q_out,
    q,
    k,
    v,
    k_pages,
    v_pages,
    pages,
    offsets,
    cos,
    sin,
    q_weight,
    k_weight,
    eps,
    k_factor,
    v_factor,
    q_stride,
    q_head_stride,
    k_stride,
    v_stride,
    k_page_stride,
    v_page_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    ROPE: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
):
    """Program (token, head): a query to ``q_out``, a key or a value to its page."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cos += token * ROPE
    sin += token * ROPE
    if head < HEADS:
        query, to_query = q + token * q_stride + head * q_head_stride, q_out + (token * HEADS + head) * DIM
        _rotate_head(to_query, q_out, 1.0, query, q_weight, eps, cos, sin, DIM, ROPE, HALF, REST, NORM)
    elif KV_HEADS > 0:
        page, offset = tl.load(pages + token), tl.load(offsets + token)
        if head < HEADS + KV_HEADS:
            kv_head = head - HEADS
            key = k + token * k_stride + kv_head * DIM
            to_key = k_pages + page * k_page_stride + (kv_head * PAGE + offset) * DIM
            _rotate_head(to_key, k_pages, k_factor, key, k_weight, eps, cos, sin, DIM, ROPE, HALF, REST, NORM)
        else:
            d = tl.arange(0, BLOCK)
            kv_head = head - HEADS - KV_HEADS
            value = tl.load(v + token * v_stride + kv_head * V_DIM + d, mask=d < V_DIM, other=0.0)
            at = page * v_page_stride + (kv_head * PAGE + offset) * V_DIM
            tl.store(v_pages + at + d, as_stored(value, v_pages, v_factor), mask=d < V_DIM)


@triton.jit
def embed_kernel(out, tokens, table, first, end, scale, SIZE: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr):
    """Program (token, block of columns): a row of the table, which holds those of ``first`` to ``end``."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + row)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    # As a number of columns: none of another rank's tokens.
    columns = tl.where((token >= first) & (token < end), SIZE, 0)
    found = tl.load(table + (token - first) * SIZE + i, mask=i < columns, other=0.0)
    if SCALED:
        found = (found.to(tl.float32) * scale).to(out.dtype.element_ty)
    tl.store(out + row * SIZE + i, found, mask=i < SIZE)


@triton.jit
def latent_kernel(
    k_pages,
    latent,
    k_rope,
    pages,
    offsets,
    cos,
    sin,
    weight,
    eps,
    latent_stride,
    rope_stride,
    page_stride,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK: tl.constexpr,
    HALF: tl.constexpr,
):
    """Program (token): its latent and its rotated key, side by side in its page."""
    token = tl.program_id(0).to(tl.int64)
    at = k_pages + tl.load(pages + token) * page_stride + tl.load(offsets + token) * (RANK + ROPE)
    i = tl.arange(0, BLOCK)
    x = tl.load(latent + token * latent_stride + i, mask=i < RANK, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / RANK + eps)
    weights = tl.load(weight + i, mask=i < RANK, other=0.0).to(tl.float32)
    tl.store(at + i, as_stored(x * scale * weights, k_pages, 1.0), mask=i < RANK)
    of_key, of_token = k_rope + token * rope_stride, token * ROPE
    _rotate_head(
        at + RANK, k_pages, 1.0, of_key, weight, eps, cos + of_token, sin + of_token, ROPE, ROPE, HALF, 1, False
    )


@triton.jit
def gated_kernel(out, gate_up, SIZE: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr):
    """Program (row, block of columns)."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = i < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + i, mask=there, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + i, mask=there, other=0.0).to(tl.float32)
    z = gate
    if GELU:  # 0.5 (1 + tanh(z / 2)) is the logistic function of z
        z = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    small = tl.exp(-tl.abs(z))  # of z or of -z, whichever does not overflow
    active = gate * tl.where(z >= 0.0, 1.0, small) / (1.0 + small)
    tl.store(out + row * SIZE + i, (active * up).to(out.dtype.element_ty), mask=there)
