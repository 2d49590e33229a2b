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
from workers.models import load_decoder, read_config


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_checkpoint("llama", tmp_path)
    return tmp_path


def load(folder: Path) -> None:
    config = read_config(folder)
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
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types: sliding_attention"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
        ({"sliding_window": 128}, "sliding_window: 128"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config: gptq is not supported"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config: fp8 is not supported for Llama"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_type: 'dynamic'"),
        ({"rope_parameters": {"rope_type": "longrope", "long_factor": [1.0]}}, "rope_scaling.long_factor: must hold 8"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_scaling.factor"),
        ({"partial_rotary_factor": 0.2}, "partial_rotary_factor: 0.2 leaves 3 of 16"),
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


OTHERS = [
    ("mistral-window", {"layer_types": ["sliding_attention"]}, "layer_types: ['sliding_attention'] are not supported"),
    ("mistral-window", {"layer_types": ["chunked_attention"] * 3}, "layer_types"),
    ("gpt-oss", {"sliding_window": None}, "sliding_window: 0 is not a window"),
    ("gpt-oss", {"num_local_experts": 3}, "mlp.experts.gate_up_proj: has shape"),
    ("gpt-oss", {"swiglu_limit": "seven"}, "swiglu_limit: must be a number"),
    ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention: True"),
    ("gemma2", {"hidden_activation": "relu"}, "hidden_activation: 'relu'"),
    ("deepseek-v3", {"kv_lora_rank": 12}, "kv_a_proj_with_mqa.weight: has shape"),
    ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func: 'softmax'"),
    ("deepseek-v2", {"norm_topk_prob": True}, "norm_topk_prob: True"),
    ("deepseek-v2", {"topk_method": "best"}, "topk_method: 'best'"),
    ("qwen3-moe", {"num_experts_per_tok": None}, "num_experts_per_tok: must be a positive integer"),
    (
        "deepseek-v3",
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": 128}},
        "quantization_config.weight_block_size: 128",
    ),
]


@pytest.mark.parametrize(("name", "changes", "named"), OTHERS)
def test_a_field_of_a_family_is_named(tmp_path: Path, name: str, changes: dict[str, Any], named: str) -> None:
    make_checkpoint(name, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(UnsupportedModel) as caught:
        load(tmp_path)
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
