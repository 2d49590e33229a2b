"""Unsupported checkpoints are refused at load, with the name of the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from holdfast.errors import UnsupportedModel
from tests.parity.checkpoints import make_checkpoint
from workers.models import ModelConfig, load_decoder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_checkpoint("llama", tmp_path)
    return tmp_path


def load(folder: Path) -> None:
    config = ModelConfig.from_folder(folder)
    load_decoder(folder, config, device=torch.device("cpu"), dtype=torch.float32, context_len=64)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures: GPT2LMHeadModel"),
        ({"architectures": None}, "architectures"),
        ({"architectures": {"name": "LlamaForCausalLM"}}, "architectures: must be a list"),
        ({"num_key_value_heads": "x"}, "num_key_value_heads: must be an integer"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps: must be a number"),
        ({"rope_parameters": [1]}, "rope_parameters: must be an object"),
        ({"rope_parameters": {"rope_theta": "x"}}, "rope_scaling.rope_theta: must be a number"),
        ({"layer_types": 7}, "layer_types: must be a list"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
        ({"sliding_window": 128}, "sliding_window: 128"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type: 'longrope'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_scaling.factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5"),
        ({"num_hidden_layers": "three"}, "num_hidden_layers"),
        ({"num_key_value_heads": 4}, "num_key_value_heads"),
        ({"dtype": "int8"}, "dtype: int8"),
        ({"intermediate_size": 97}, "mlp.gate_proj.weight: has shape"),
        ({"attention_bias": True}, "q_proj.bias: this tensor is missing"),
        ({"num_hidden_layers": 2}, "model.layers.2"),
    ],
)
def test_config_field_is_named(folder: Path, changes: dict[str, Any], named: str) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(UnsupportedModel) as caught:
        load(folder)
    assert named in caught.value.message


def test_pickled_weights_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match=r"pytorch_model.bin: pickled weights are refused"):
        load(folder)


@pytest.mark.parametrize("eos", [2048, -1, [1, 99_999], "</s>", [None]])
def test_an_end_that_no_token_is_is_refused(folder: Path, eos: object) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(UnsupportedModel, match="eos_token_id"):
        load(folder)


@pytest.mark.parametrize("content", [b"", b"\x10\x00\x00\x00\x00\x00\x00\x00nonsense"])
def test_damaged_weights_are_refused(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(UnsupportedModel, match=r"model.safetensors: not a readable"):
        load(folder)


def test_damaged_config_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(UnsupportedModel, match=r"config.json: not valid JSON"):
        load(folder)


def test_integer_weights_are_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    state = load_file(path)
    state["model.norm.weight"] = state["model.norm.weight"].to(torch.int8)
    save_file(state, path)
    with pytest.raises(UnsupportedModel, match=r"model.norm.weight: is torch.int8"):
        load(folder)


def test_missing_shard_is_refused(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(UnsupportedModel, match=r"gone.safetensors"):
        load(folder)
