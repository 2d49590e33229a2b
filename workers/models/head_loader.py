"""Load a draft head: from the checkpoint of the model that it drafts for, or from one of its own."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from workers.kernels.backend import Backend
from workers.kernels.products import Weight
from workers.models.decoder import DecoderWeights
from workers.models.heads import MTP, NUM_TAPS, DraftHead, Eagle3Head, HeadConfig, MTPHead
from workers.models.loader import Loader
from workers.models.parallel import Shard
from workers.models.spec import ModelConfig
from workers.models.tensors import Tensors, weight_files


def load_head(
    folder: Path,
    config: HeadConfig,
    target_folder: Path,
    target: ModelConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    context_len: int,
    kernels: Backend,
    weight_dtype: torch.dtype | None = None,
) -> DraftHead:
    """Load a head to ``device``, whole. See ``load_decoder``.

    Raises UnsupportedModel for missing, unknown or misshapen tensors, which it names.
    """
    with ExitStack() as stack:

        def loader(path: Path, model: ModelConfig) -> Loader:
            tensors = Tensors(weight_files(path), stack, device, dtype, model.fp8_block)
            return Loader(tensors, model, model, Shard(), weight_dtype or dtype, kernels)

        whole = replace(target, layers=target.layers[-1:])
        given = {"context_len": context_len, "device": device, "dtype": dtype, "kernels": kernels}
        of_target = loader(target_folder, whole)
        if config.kind == MTP:
            return _mtp(of_target, f"model.layers.{len(target.layers)}", config.model, given)
        return _eagle3(loader(folder, config.model), of_target, config, given)


def _mtp(load: Loader, name: str, model: ModelConfig, given: dict[str, object]) -> DraftHead:
    """Its embedding and its logits are the model's own; copies of them in its layer are not read."""
    hidden, (layer,) = model.hidden_size, model.layers
    table = load.vocabulary("model.embed_tokens.weight")
    weights = DecoderWeights(
        embedding=table,
        layers=[load.layer(name, layer, layer)],
        final_norm=load.norm(f"{name}.shared_head.norm", hidden),
        head=table if model.tie_embeddings else load.vocabulary("lm_head.weight"),
    )
    return MTPHead(
        model,
        weights,
        token_norm=load.norm(f"{name}.enorm", hidden),
        state_norm=load.norm(f"{name}.hnorm", hidden),
        projection=load.matrix(f"{name}.eh_proj.weight", hidden, 2 * hidden),
        **given,
    )


def _eagle3(load: Loader, of_target: Loader, config: HeadConfig, given: dict[str, object]) -> DraftHead:
    tensors, model = load.tensors, config.model
    (layer,), hidden = model.layers, model.hidden_size
    own = next((name for name in ("embed_tokens.weight", "model.embed_tokens.weight") if tensors.has(name)), None)
    table: Weight = load.vocabulary(own) if own else of_target.vocabulary("model.embed_tokens.weight")
    token_ids: Tensor | None = None
    if config.num_choices != model.vocab_size:
        token_ids = tensors.take_ids("d2t", config.num_choices) + torch.arange(
            config.num_choices, device=tensors.device
        )
    head = Eagle3Head(
        model,
        DecoderWeights(
            embedding=table,
            layers=[load.layer("midlayer", layer, layer)],
            final_norm=load.norm("norm", hidden),
            head=load.matrix("lm_head.weight", config.num_choices, hidden, layer=False),
        ),
        state_norm=load.norm("midlayer.hidden_norm", hidden),
        fusion=tensors.take("fc.weight", hidden, NUM_TAPS * config.target_size),
        token_ids=token_ids,
        **given,
    )
    tensors.skip("t2d")
    tensors.skip("d2t")
    tensors.refuse_unused(tied=False, num_layers=1, num_extra_layers=0)
    return head
