"""e4m3 in Triton, by its bits: not every architecture converts it. Pages of fp8 are passed as bytes."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def as_stored(x, pages, factor):
    """``x`` as ``pages`` keep it: in their own type, or ``x * factor`` in e4m3."""
    if pages.dtype.element_ty == tl.uint8:
        return _to_fp8(x.to(tl.float32) * factor)
    else:
        return x.to(pages.dtype.element_ty)


@triton.jit
def as_read(x, like):
    """What was loaded from pages, in the type of ``like``. Every e4m3 is an fp16, and a bf16."""
    if x.dtype == tl.uint8:
        wide = x.to(tl.uint16)
        # The exponent's bias is 7, and 15 in fp16.
        bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        return (bits.to(tl.float16, bitcast=True) * 256.0).to(like.dtype)
    else:
        return x.to(like.dtype)


@triton.jit
def _to_fp8(x):
    """fp32 to the nearest e4m3, ties to even, saturating."""
    bits = tl.minimum(tl.maximum(x, -448.0), 448.0).to(tl.uint32, bitcast=True)
    sign, magnitude = (bits >> 24) & 0x80, bits & 0x7FFFFFFF
    # Above 2**-6: drop 20 of 23 bits of the mantissa, and move the exponent's bias from 127 to 7.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960
    # Below: in 2**14 + x the last bit of the mantissa is 2**-9, that of a subnormal.
    shifted = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True)
    code = tl.where(magnitude < 0x3C800000, shifted - 0x46800000, normal)
    return (sign | code).to(tl.uint8)
