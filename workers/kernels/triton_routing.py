"""The choice of a token's experts in Triton, and what is done around their products: see ``grouped_experts``.

Three launches, whatever the number of tokens and experts.
"""

from __future__ import annotations

import triton
import triton.language as tl

SOFTMAX, SIGMOID, TOP_SOFTMAX = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""``RouterSpec.score``"""


@triton.jit
def route_kernel(
    chosen,
    weights,
    logits,
    choice_bias,
    scale,
    GROUPS: tl.constexpr,
    MEMBERS: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SCORE: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BY_TWO: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program (token): its experts, the best first, and of equal ones the lowest; and their weights.

    Experts are ``[BLOCK_G, BLOCK_M]`` here, of which there are ``[GROUPS, MEMBERS]``.
    """
    token = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_M)
    expert = group[:, None] * MEMBERS + member[None, :]
    there = (group < GROUPS)[:, None] & (member < MEMBERS)[None, :]
    scores = tl.load(logits + token * (GROUPS * MEMBERS) + expert, mask=there, other=-float("inf"))
    if SCORE == SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-scores))
    if SCORE == SOFTMAX:
        powers = tl.exp(scores - tl.max(scores))
        scores = powers / tl.sum(powers)
    choice = scores
    if BIAS:
        choice += tl.load(choice_bias + expert, mask=there, other=0.0)
    choice = tl.where(there, choice, -float("inf"))
    if GROUPS > 1:
        best, at = tl.max(choice, axis=1, return_indices=True)
        if BY_TWO:
            best += tl.max(tl.where(member[None, :] == at[:, None], -float("inf"), choice), axis=1)
        others = tl.full([BLOCK_G], 1, tl.int1)
        for _ in tl.static_range(TOP_GROUPS):
            _, top = tl.max(best, axis=0, return_indices=True)
            others = others & (group != top)
            best = tl.where(group == top, -float("inf"), best)
        choice = tl.where(others[:, None] & there, -float("inf") if BIAS else 0.0, choice)
    choice = tl.reshape(choice, [BLOCK_G * BLOCK_M])
    scores = tl.reshape(scores, [BLOCK_G * BLOCK_M])
    number, place = tl.arange(0, BLOCK_G * BLOCK_M), tl.arange(0, BLOCK_K)
    found = tl.full([BLOCK_K], -float("inf"), tl.float32)
    for i in tl.static_range(TOP_K):
        _, top = tl.max(choice, axis=0, return_indices=True)
        found = tl.where(place == i, tl.sum(tl.where(number == top, scores, 0.0)), found)
        choice = tl.where(number == top, -float("inf"), choice)
        tl.store(chosen + token * TOP_K + i, (top // BLOCK_M * MEMBERS + top % BLOCK_M).to(tl.int64))
    if SCORE == TOP_SOFTMAX:
        powers = tl.exp(found - tl.max(found))
        found = powers / tl.sum(powers)
    else:
        if NORMALIZE:
            found = found / (tl.sum(tl.where(place < TOP_K, found, 0.0)) + 1e-20)
        found = found * scale
    tl.store(weights + token * TOP_K + place, found.to(weights.dtype.element_ty), mask=place < TOP_K)


@triton.jit(do_not_specialize=["num_rows", "first", "num_blocks"])
def sort_kernel(order, blocks, ends, chosen, num_rows, first, num_blocks, HEIGHT: tl.constexpr, BLOCK: tl.constexpr):
    """Program (local expert): its rows, in order, after those of the experts before it; its blocks; and its end.

    Its blocks begin at ``number + rows before // HEIGHT``. So every expert has room for its own, without knowing how
    many blocks those before it have; blocks between them are no one's.
    """
    number = tl.program_id(0)
    expert = first + number
    before, count = 0, 0
    for start in range(0, num_rows, BLOCK):
        i = start + tl.arange(0, BLOCK)
        each = tl.load(chosen + i, mask=i < num_rows, other=-1)
        before += tl.sum(((each >= first) & (each < expert)).to(tl.int32))
        count += tl.sum((each == expert).to(tl.int32))
    place = before
    for start in range(0, num_rows, BLOCK):
        i = start + tl.arange(0, BLOCK)
        own = tl.load(chosen + i, mask=i < num_rows, other=-1) == expert
        tl.store(order + place + tl.cumsum(own.to(tl.int32), 0) - 1, i.to(tl.int64), mask=own)
        place += tl.sum(own.to(tl.int32))
    tl.store(ends + number, before + count)
    block = number + before // HEIGHT
    last = block + (count + HEIGHT - 1) // HEIGHT
    after = number + 1 + (before + count) // HEIGHT
    if number == tl.num_programs(0) - 1:
        after = num_blocks
    for i in range(block, after):
        tl.store(blocks + 2 * i, tl.where(i < last, number, -1).to(tl.int64))
        tl.store(blocks + 2 * i + 1, (before + (i - block) * HEIGHT).to(tl.int64))


@triton.jit(do_not_specialize=["first"])
def combine_kernel(
    out, outputs, chosen, first, NUM_LOCAL: tl.constexpr, TOP_K: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """Program (token, block of columns): the sum of its experts' outputs, in the order of its choices."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(TOP_K):
        number = tl.load(chosen + token * TOP_K + i) - first
        there = column < tl.where((number >= 0) & (number < NUM_LOCAL), SIZE, 0)
        total += tl.load(outputs + (token * TOP_K + i) * SIZE + column, mask=there, other=0.0).to(tl.float32)
    tl.store(out + token * SIZE + column, total.to(out.dtype.element_ty), mask=column < SIZE)
