"""``holdfast tune``: the shapes that a rank's kernels have, found by running its share of the model."""

from __future__ import annotations

import dataclasses
from array import array

import torch
from torch import Tensor

from workers.config import EngineConfig
from workers.engine.batch import Batch
from workers.engine.paged_model import PagedModel
from workers.engine.rank import activation_dtype, kv_dtype_of, pick_device
from workers.kernels.backend import load_backend
from workers.kernels.tiles import Shape, Tile, Tiles
from workers.models import KVPool, load_decoder, read_config
from workers.models.parallel import Shard

PROMPT = 64


@dataclasses.dataclass(frozen=True, slots=True)
class _Share:
    """A rank whose peers do not exist: what they would add is missing, and the shapes are right."""

    shard: Shard

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor) -> list[Tensor] | None:
        return [x] * self.shard.size


class _Asked(Tiles):
    """Notes what it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[Shape] = set()

    def find(self, shape: Shape, num_rows: int) -> Tile | None:
        self.shapes.add(shape)
        return None


@torch.inference_mode()
def engine_shapes(config: EngineConfig, num_ranks: int) -> tuple[list[Shape], torch.device, torch.dtype]:
    """What the kernels of the first of ``num_ranks`` are asked for, its device, and the type of its KV.

    Loads the checkpoint. Raises ConfigError, and what reading a checkpoint does.
    """
    device = pick_device(config.device)
    model = read_config(config.model)
    dtype = activation_dtype(config.dtype, model, device)
    tiles, kv_dtype = _Asked(), kv_dtype_of(config.kv_cache_dtype, dtype)
    backend = load_backend("triton", device, dtype=dtype, deterministic=config.deterministic, tiles=tiles)
    decoder = load_decoder(
        config.model,
        model,
        device=device,
        dtype=dtype,
        context_len=min(model.max_context_len, 4 * PROMPT),
        group=_Share(Shard(0, num_ranks)) if num_ranks > 1 else None,
        expert_parallel=config.expert_parallel,
        kernels=backend,
    )
    num_pages = -(-2 * PROMPT // config.page_size)
    num_groups = len(decoder.config.kv_groups)
    kv = KVPool(decoder.config, [num_pages] * num_groups, config.page_size, kv_dtype, device, decoder.kv_scales)
    tables = [torch.arange(num_pages, dtype=torch.int32, device=device)[None]] * num_groups
    paged = PagedModel(decoder, backend, kv, tables, lambda chosen: chosen)
    paged.forward(Batch([0], [0], [PROMPT], array("i", [0] * PROMPT), [PROMPT - 1]))
    return sorted(tiles.shapes, key=repr), device, kv_dtype
