"""Reading ``config.json``: typed fields, and errors that name the field, its value and what is supported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from holdfast.errors import UnsupportedModel
from workers.models.spec import RopeConfig

ROPE_TYPES = ("default", "linear", "llama3", "longrope", "yarn")
ROPE_FACTORS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
MAX_LAYERS, MAX_EXPERTS = 4096, 65_536
"""No model has as many as a damaged config may say, for each of which something would be made."""
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises UnsupportedModel."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UnsupportedModel(f"{path.name}: not found in {path.parent}; a checkpoint folder needs it") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UnsupportedModel(f"{path.name}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise UnsupportedModel(f"{path.name}: must hold a JSON object")
    return value


class Fields:
    """The fields of one config. Null counts as absent. Methods raise UnsupportedModel."""

    def __init__(self, raw: dict[str, Any]) -> None:
        self._raw = raw

    def given(self, key: str) -> Any:
        """The value as it is; None if absent."""
        return self._raw.get(key)

    def size(self, key: str, default: int | None = None, most: int | None = None) -> int:
        """A positive integer, at most ``most``."""
        value = self._raw.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            noun = "a positive integer" if default is None else "an integer"
            raise UnsupportedModel(f"{key}: must be {noun}, config.json has {value!r}")
        if most is not None and value > most:
            raise UnsupportedModel(f"{key}: must be at most {most}, config.json has {value}")
        return value

    def num_layers(self) -> int:
        return self.size("num_hidden_layers", most=MAX_LAYERS)

    def num_experts(self, key: str, default: int | None = None) -> int:
        """A router's experts, by the family's name for them."""
        return self.size(key, default, most=MAX_EXPERTS)

    def count(self, key: str, default: int = 0) -> int:
        """An integer from 0 on."""
        value = self._raw.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise UnsupportedModel(f"{key}: must be an integer, config.json has {value!r}")
        return value

    def number(self, key: str, default: float) -> float:
        value = self._raw.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise UnsupportedModel(f"{key}: must be a number, config.json has {value!r}")
        return float(value)

    def scale_of(self, key: str, default: float) -> float:
        """What queries are multiplied by, where ``key`` says the root of how much they are divided by."""
        value = self.number(key, default)
        if not value > 0:
            raise UnsupportedModel(f"{key}: must be a positive number, config.json has {value!r}")
        return float(value**-0.5)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._raw.get(key)
        if value is not None and not isinstance(value, bool):
            raise UnsupportedModel(f"{key}: must be true or false, config.json has {value!r}")
        return default if value is None else value

    def items(self, key: str) -> list[Any]:
        value = self._raw.get(key)
        if value is not None and not isinstance(value, list):
            raise UnsupportedModel(f"{key}: must be a list, config.json has {value!r}")
        return value or []

    def table(self, key: str) -> dict[str, Any]:
        value = self._raw.get(key)
        if value is not None and not isinstance(value, dict):
            raise UnsupportedModel(f"{key}: must be an object, config.json has {value!r}")
        return value or {}

    def one_of(self, key: str, supported: tuple[str, ...], default: str) -> str:
        value = self._raw.get(key)
        value = default if value is None else value
        if value not in supported:
            raise UnsupportedModel(f"{key}: {value!r} is not supported; supported: {', '.join(supported)}")
        return str(value)

    def refuse(self, key: str, unless: Any, why: str) -> None:
        """Refuse a value other than ``unless`` (or none)."""
        if self._raw.get(key) not in (None, unless):
            raise UnsupportedModel(f"{key}: {self._raw[key]!r} is not supported; supported: {why}")

    def dtype(self) -> torch.dtype:
        name = str(self._raw.get("dtype") or self._raw.get("torch_dtype") or "float32").removeprefix("torch.")
        if name not in DTYPES:
            raise UnsupportedModel(f"dtype: {name} is not supported; supported: {', '.join(DTYPES)}")
        return DTYPES[name]

    def rope(self, head_dim: int, layer_type: str = "", theta: float | None = None) -> RopeConfig:
        """The rotary embedding, or that of one type of layers, with ``theta`` where it has a field of its own."""
        # transformers 5 writes rope_parameters (with rope_theta inside), 4 wrote rope_scaling beside rope_theta.
        scaling = dict(self.table("rope_parameters") or self.table("rope_scaling"))
        if isinstance(scaling.get(layer_type), dict):
            scaling, theta = dict(scaling[layer_type]), None
        elif theta is not None:
            scaling = {}
        inside = Fields({f"rope_scaling.{key}": value for key, value in scaling.items()})
        rope_type = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
        if rope_type not in ROPE_TYPES:
            raise UnsupportedModel(
                f"rope_scaling.rope_type: {rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}"
            )
        if theta is None:
            theta = inside.number("rope_scaling.rope_theta", self.number("rope_theta", 10_000.0))
        partial = inside.number("rope_scaling.partial_rotary_factor", self.number("partial_rotary_factor", 1.0))
        dim = int(head_dim * partial)
        if not 0 < dim <= head_dim or dim % 2:
            raise UnsupportedModel(f"partial_rotary_factor: {partial} leaves {dim} of {head_dim} elements to rotate")
        # Old yarn configs leave the trained length to max_position_embeddings, Phi-3 has it beside.
        if scaling.get("original_max_position_embeddings") is None:
            trained = self.size("original_max_position_embeddings", self.size("max_position_embeddings"))
            scaling["original_max_position_embeddings"] = trained
        scaling["max_position_embeddings"] = self.size("max_position_embeddings")
        for key in ROPE_FACTORS.get(rope_type, ()):
            if not isinstance(scaling.get(key), (int, float)):
                raise UnsupportedModel(f"rope_scaling.{key}: must be a number for rope type {rope_type}")
        for key in ("long_factor", "short_factor") if rope_type == "longrope" else ():
            factors = inside.items(f"rope_scaling.{key}")
            if len(factors) != dim // 2 or not all(isinstance(factor, (int, float)) for factor in factors):
                raise UnsupportedModel(f"rope_scaling.{key}: must hold {dim // 2} numbers")
        return RopeConfig(dim, theta, rope_type, scaling)
