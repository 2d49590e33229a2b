"""Rotary position embeddings (arXiv:2104.09864) and the scalings that checkpoints use."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from workers.models.spec import RopeConfig


def rope_table(rope: RopeConfig, num_positions: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each fp32 ``[num_positions, rope.dim]`` (the two halves repeat)."""
    inverse, magnitude = inverse_frequencies(rope, num_positions)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), inverse)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos() * magnitude, angles.sin() * magnitude


def inverse_frequencies(rope: RopeConfig, num_positions: int) -> tuple[Tensor, float]:
    """Inverse frequencies ``[rope.dim / 2]`` and the factor on the cosines and sines."""
    base = 1.0 / rope.theta ** (torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim)
    p = rope.parameters
    if rope.rope_type == "linear":
        return base / p["factor"], 1.0
    if rope.rope_type == "llama3":
        return _llama3(base, p["factor"], p["low_freq_factor"], p["high_freq_factor"], _trained_len(rope)), 1.0
    if rope.rope_type == "yarn":
        return _yarn(base, rope), _yarn_magnitude(rope)
    if rope.rope_type == "longrope":
        return _longrope(base, rope, num_positions)
    return base, 1.0


def _trained_len(rope: RopeConfig) -> int:
    return int(rope.parameters["original_max_position_embeddings"])


def _llama3(base: Tensor, factor: float, low: float, high: float, trained_len: int) -> Tensor:
    """Llama 3.1: stretch long wavelengths, keep short ones, and blend those in between."""
    wavelength = 2 * math.pi / base
    blend = ((trained_len / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * base / factor + blend * base


def _yarn(base: Tensor, rope: RopeConfig) -> Tensor:
    """YaRN (arXiv:2309.00071): interpolate slow dimensions, keep fast ones, with a ramp in between."""
    p, head_dim = rope.parameters, rope.dim

    def dimension(num_rotations: float) -> float:
        turns = _trained_len(rope) / (num_rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(p.get("beta_fast") or 32), dimension(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    interpolated, factor = ramp.clamp(0.0, 1.0), float(p["factor"])
    return base / factor * interpolated + base * (1 - interpolated)


def _yarn_magnitude(rope: RopeConfig) -> float:
    p = rope.parameters
    if p.get("attention_factor") is not None:
        return float(p["attention_factor"])

    def mscale(weight: float) -> float:
        return 1.0 if p["factor"] <= 1 else 0.1 * weight * math.log(p["factor"]) + 1.0

    if p.get("mscale") and p.get("mscale_all_dim"):
        return mscale(p["mscale"]) / mscale(p["mscale_all_dim"])
    return mscale(1.0)


def _longrope(base: Tensor, rope: RopeConfig, num_positions: int) -> tuple[Tensor, float]:
    """LongRoPE (arXiv:2402.13753): one set of factors for short contexts, one for long ones.

    Which one is used depends on the context that is served, not on a sequence's length so far: a session's
    cached keys must not change their meaning when it grows (vLLM decides so too).
    """
    p, trained_len = rope.parameters, _trained_len(rope)
    factor = p.get("factor") or p["max_position_embeddings"] / trained_len
    magnitude = p.get("attention_factor")
    if magnitude is None:
        magnitude = math.sqrt(1 + math.log(factor) / math.log(trained_len)) if factor > 1 else 1.0
    factors = torch.tensor(p["long_factor" if num_positions > trained_len else "short_factor"], dtype=torch.float32)
    return base / factors, float(magnitude)
