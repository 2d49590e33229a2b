"""Draft heads: one layer that continues from the hidden states of the model that it drafts for.

A token's row is computed from its embedding and from the state that the model had one position before, and its KV lies
at that position. Where the model has not been yet, the head's own last state stands for the model's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from holdfast.errors import UnsupportedModel
from workers.kernels.products import Weight
from workers.models.config import parse_config
from workers.models.decoder import Decoder, ForwardBatch, Hidden, LayerWeights
from workers.models.families import dense
from workers.models.fields import Fields, read_json
from workers.models.spec import AttentionSpec, ModelConfig

EAGLE3, MTP = "EAGLE3", "MTP"
EAGLE3_ARCHITECTURE = "LlamaForCausalLMEagle3"
NUM_TAPS = 3


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """A head of one layer."""

    kind: str
    """``EAGLE3`` (arXiv:2503.01840, in the layout of its authors) or ``MTP`` (DeepSeek-V3, arXiv:2412.19437)."""
    model: ModelConfig
    taps: tuple[int, ...]
    """Which states of the model it continues from: see ``Decoder.hidden``."""
    num_choices: int
    """Tokens that it may choose."""
    target_size: int
    """Elements of one of the model's states."""


def mtp_config(target: ModelConfig) -> HeadConfig:
    """The layer of a checkpoint that predicts the token after the next. Raises UnsupportedModel if there is none."""
    if not target.num_extra_layers:
        raise UnsupportedModel("num_nextn_predict_layers: the checkpoint has no layer that predicts further tokens")
    model = replace(target, layers=target.layers[-1:], num_extra_layers=0)
    return HeadConfig(MTP, model, (len(target.layers),), target.vocab_size, target.hidden_size)


def eagle3_config(folder: Path, target: ModelConfig) -> HeadConfig:
    """Of an EAGLE-3 checkpoint for ``target``. Raises UnsupportedModel."""
    fields = Fields(read_json(folder / "config.json"))
    model = parse_config(fields, {EAGLE3_ARCHITECTURE: _eagle3_layer})
    if model.vocab_size != target.vocab_size:
        raise UnsupportedModel(
            f"vocab_size: the head is for a model with {model.vocab_size} tokens, this one has {target.vocab_size}"
        )
    target_size = fields.size("target_hidden_size", model.hidden_size)
    if target_size != target.hidden_size:
        raise UnsupportedModel(
            f"target_hidden_size: the head is for states of {target_size} elements, the model's have "
            f"{target.hidden_size}"
        )
    return HeadConfig(
        EAGLE3, model, _taps(fields, target), fields.size("draft_vocab_size", model.vocab_size), target_size
    )


def _eagle3_layer(fields: Fields) -> dict[str, Any]:
    fields.refuse("num_hidden_layers", 1, "1, a head of one layer")
    (layer,) = dense.llama(fields)["layers"]
    assert isinstance(layer.mixer, AttentionSpec)
    return {"layers": (replace(layer, mixer=replace(layer.mixer, num_inputs=2)),)}


def _taps(fields: Fields, target: ModelConfig) -> tuple[int, ...]:
    """Inputs of an early, a middle and a late layer. A config names layers by their outputs."""
    count, name = len(target.layers), "eagle_aux_hidden_state_layer_ids"
    given = Fields(fields.table("eagle_config")).items(name) or fields.items(name)
    if not given:
        return tuple(min(max(0, i), count) for i in (2, count // 2, count - NUM_TAPS))
    if len(given) != NUM_TAPS or not all(isinstance(i, int) and -1 <= i < count - 1 for i in given):
        raise UnsupportedModel(f"{name}: {given!r} are not {NUM_TAPS} of the model's first {count - 1} layers")
    return tuple(i + 1 for i in given)


class DraftHead(Decoder, ABC):
    """A head's layer. Its batches have ``states``."""

    token_ids: Tensor | None = None
    """int64 ``[choices]``: the tokens that its logits are of; None: all."""
    target_size: int
    """Elements of one of the model's states."""

    @abstractmethod
    def states_of(self, taps: Tensor) -> Tensor:
        """What it continues from, ``[tokens, hidden]``, by the model's tapped states ``[tokens, taps, target_size]``.

        Zeros of zeros.
        """

    @abstractmethod
    def next_states(self, hidden: Hidden) -> Tensor:
        """What it continues from after the tokens that it drafted itself."""


class MTPHead(DraftHead):
    """Multi-token prediction: the token's embedding and the state, normalized each and projected to one."""

    def __init__(self, *args: Any, token_norm: Tensor, state_norm: Tensor, projection: Weight, **more: Any) -> None:
        super().__init__(*args, **more)
        self._token_norm, self._state_norm, self._projection = token_norm, state_norm, projection
        self.target_size = self.config.hidden_size

    def states_of(self, taps: Tensor) -> Tensor:
        return taps.select(1, 0)

    def next_states(self, hidden: Hidden) -> Tensor:
        return hidden.normed

    def _enter(self, batch: ForwardBatch, first: LayerWeights) -> tuple[Tensor, Tensor]:
        assert batch.states is not None
        eps, embedded = self.config.norm_eps, self._embed(batch.tokens)
        both = self._ops.norm_both(embedded, self._token_norm, batch.states, self._state_norm, eps)
        hidden = self._kernels.products.linear(both, self._projection)
        return self._ops.add_norm(hidden, None, first.before_mixer, eps)


class Eagle3Head(DraftHead):
    """EAGLE-3: attention reads the token's embedding beside the state, which alone is the residual stream."""

    def __init__(self, *args: Any, state_norm: Tensor, fusion: Tensor, token_ids: Tensor | None, **more: Any) -> None:
        super().__init__(*args, **more)
        self._state_norm, self._fusion, self.token_ids = state_norm, fusion, token_ids
        self.target_size = fusion.shape[1] // NUM_TAPS

    def states_of(self, taps: Tensor) -> Tensor:
        return torch.nn.functional.linear(taps.flatten(1), self._fusion)

    def next_states(self, hidden: Hidden) -> Tensor:
        return hidden.last

    def _enter(self, batch: ForwardBatch, first: LayerWeights) -> tuple[Tensor, Tensor]:
        assert batch.states is not None and first.before_mixer is not None
        embedded, eps = self._embed(batch.tokens), self.config.norm_eps
        x = self._ops.norm_both(embedded, first.before_mixer, batch.states, self._state_norm, eps)
        return x, batch.states
