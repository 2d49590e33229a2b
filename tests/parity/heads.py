"""Draft heads of random weights, and what they draft by a plain reading of their papers, over whole sequences."""

from __future__ import annotations

import json
import shutil
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from tests.parity.checkpoints import make_checkpoint
from workers.config import BUNDLED_MODEL

EAGLE3_SHAPE: dict[str, Any] = {
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "rope_theta": 5000.0,
    "max_position_embeddings": 512,
}


class Head(ABC):
    """A head and the model that it drafts for, in fp32."""

    def __init__(self, target: PreTrainedModel) -> None:
        self.target = target

    @abstractmethod
    def states(self, tokens: list[int]) -> Tensor:
        """What it continues from, ``[tokens, hidden]``."""

    @abstractmethod
    def run(self, tokens: list[int], states: Tensor) -> tuple[Tensor, Tensor]:
        """The last token's logits, of all tokens, and the state that a draft of it leaves."""

    @torch.no_grad()
    def draft(self, tokens: list[int], count: int) -> list[int]:
        """What may follow ``tokens``, greedily."""
        rows, states = tokens[1:], self.states(tokens[:-1])
        while True:
            logits, state = self.run(rows, states)
            rows = [*rows, int(logits.argmax())]
            if len(rows) == len(tokens) - 1 + count:
                return rows[len(tokens) - 1 :]
            states = torch.cat((states, state[None]))


def _layer(layer: nn.Module, hidden: Tensor, rotary: nn.Module) -> Tensor:
    """A decoder layer of transformers over ``[tokens, hidden]``, causal."""
    count = len(hidden)
    mask = torch.full((1, 1, count, count), -torch.inf).triu(1)
    positions = torch.arange(count)[None]
    rotation = rotary(hidden[None], positions)
    return layer(hidden[None], attention_mask=mask, position_ids=positions, position_embeddings=rotation)[0]


class MTP(Head):
    """DeepSeek-V3 (arXiv:2412.19437, section 2.2), as its authors store it: one layer past the last."""

    def __init__(self, whole: PreTrainedModel) -> None:
        super().__init__(whole)
        self.layers = whole.model.layers
        self.block = self.layers[-1]
        whole.model.layers = self.layers[:-1]
        whole.model.config.num_hidden_layers = len(self.layers) - 1
        hidden, eps = whole.config.hidden_size, whole.config.rms_norm_eps
        self.norms = {name: LlamaRMSNorm(hidden, eps) for name in ("enorm", "hnorm", "shared_head.norm")}
        self.projection = nn.Linear(2 * hidden, hidden, bias=False)
        with torch.no_grad():
            for norm in self.norms.values():
                norm.weight.add_(torch.randn(hidden) * 0.2)

    def tensors(self) -> dict[str, Tensor]:
        """What the checkpoint has beside the layers."""
        name = f"model.layers.{len(self.layers) - 1}."
        found = {name + norm + ".weight": module.weight.detach() for norm, module in self.norms.items()}
        found[name + "eh_proj.weight"] = self.projection.weight.detach()
        found[name + "shared_head.head.weight"] = self.target.lm_head.weight.detach().clone()
        found[name + "embed_tokens.weight"] = self.target.model.embed_tokens.weight.detach().clone()
        return found

    def states(self, tokens: list[int]) -> Tensor:
        return self.target.model(torch.tensor([tokens])).last_hidden_state[0]

    def run(self, tokens: list[int], states: Tensor) -> tuple[Tensor, Tensor]:
        embedded = self.norms["enorm"](self.target.model.embed_tokens(torch.tensor(tokens)))
        hidden = self.projection(torch.cat((embedded, self.norms["hnorm"](states)), dim=-1))
        hidden = _layer(self.block, hidden, self.target.model.rotary_emb)
        last = self.norms["shared_head.norm"](hidden)[-1]
        return self.target.lm_head(last), last


class Eagle3(Head):
    """EAGLE-3 (arXiv:2503.01840): states of three layers, fused; attention reads the token beside them."""

    def __init__(self, target: PreTrainedModel, taps: list[int], num_choices: int) -> None:
        super().__init__(target)
        size, vocab = target.config.hidden_size, target.config.vocab_size
        config = LlamaConfig(**EAGLE3_SHAPE, hidden_size=size, vocab_size=vocab, attn_implementation="eager")
        self.taps, self.midlayer, self.rotary = taps, LlamaDecoderLayer(config, 0), LlamaRotaryEmbedding(config)
        attention = self.midlayer.self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(attention, name, nn.Linear(2 * size, getattr(attention, name).out_features, bias=False))
        eps = config.rms_norm_eps
        self.hidden_norm, self.norm = LlamaRMSNorm(size, eps), LlamaRMSNorm(size, eps)
        self.fc = nn.Linear(len(taps) * size, size, bias=False)
        self.lm_head = nn.Linear(size, num_choices, bias=False)
        self.choices = torch.randperm(vocab)[:num_choices].sort().values
        with torch.no_grad():
            for parameter in (*self.midlayer.parameters(), self.hidden_norm.weight, self.norm.weight):
                parameter.add_(torch.randn_like(parameter) * 0.2) if parameter.ndim == 1 else parameter.mul_(2.0)

    def tensors(self) -> dict[str, Tensor]:
        """The checkpoint."""
        parts = {"midlayer.": self.midlayer, "midlayer.hidden_norm.": self.hidden_norm, "norm.": self.norm}
        parts |= {"fc.": self.fc, "lm_head.": self.lm_head}
        found = {prefix + name: t for prefix, part in parts.items() for name, t in part.state_dict().items()}
        chosen = torch.zeros(self.target.config.vocab_size, dtype=torch.bool)
        chosen[self.choices] = True
        return found | {"d2t": self.choices - torch.arange(len(self.choices)), "t2d": chosen}

    def states(self, tokens: list[int]) -> Tensor:
        found = self.target.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        return self.fc(torch.cat([found[i][0] for i in self.taps], dim=-1))

    def run(self, tokens: list[int], states: Tensor) -> tuple[Tensor, Tensor]:
        layer = self.midlayer
        embedded = layer.input_layernorm(self.target.model.embed_tokens(torch.tensor(tokens)))
        both = torch.cat((embedded, self.hidden_norm(states)), dim=-1)[None]
        count = len(tokens)
        mask, positions = torch.full((1, 1, count, count), -torch.inf).triu(1), torch.arange(count)[None]
        rotation = self.rotary(states[None], positions)
        hidden = states + layer.self_attn(both, attention_mask=mask, position_embeddings=rotation)[0][0]
        last = (hidden + layer.mlp(layer.post_attention_layernorm(hidden)))[-1]
        logits = torch.full((self.target.config.vocab_size,), -torch.inf)
        logits[self.choices] = self.lm_head(self.norm(last))
        return logits, last


def make_mtp(folder: Path, **shape: int) -> MTP:
    """A model of the family ``deepseek-v3`` with a head in its checkpoint, at ``folder``."""
    shape = {"vocab_size": 2048, "max_position_embeddings": 512, "num_hidden_layers": 3} | shape
    shape["num_hidden_layers"] += 1
    head = MTP(make_checkpoint("deepseek-v3", folder, **shape))
    save_file(load_file(folder / "model.safetensors") | head.tensors(), folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": shape["num_hidden_layers"] - 1, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    copy_tokenizer(folder)
    return head


def make_eagle3(
    folder: Path, family: str, target_folder: Path, *, num_choices: int = 300, layers: list[int] | None = None
) -> Eagle3:
    """A head at ``folder`` for a new model of ``family`` at ``target_folder``. ``layers``: whose outputs it reads."""
    target = make_checkpoint(family, target_folder, vocab_size=2048, max_position_embeddings=512, num_hidden_layers=5)
    copy_tokenizer(target_folder)
    return write_eagle3(folder, target, num_choices=num_choices, layers=layers)


def write_eagle3(
    folder: Path, target: PreTrainedModel, *, num_choices: int = 300, layers: list[int] | None = None
) -> Eagle3:
    """A head at ``folder`` for ``target``."""
    count = target.config.num_hidden_layers
    taps = [layer + 1 for layer in layers] if layers else [min(2, count), count // 2, max(0, count - 3)]
    head = Eagle3(target, taps, num_choices)
    folder.mkdir(exist_ok=True, parents=True)
    config = EAGLE3_SHAPE | {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
    config |= {"hidden_size": target.config.hidden_size, "vocab_size": target.config.vocab_size}
    config |= {"draft_vocab_size": num_choices, "rms_norm_eps": 1e-6}
    if layers:
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": layers}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in head.tensors().items()}, folder / "model.safetensors")
    return head


def copy_tokenizer(folder: Path) -> None:
    """The bundled one, which has 2,048 tokens."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED_MODEL / name, folder / name)
