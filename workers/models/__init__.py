"""Checkpoints and the forward pass over page tables."""

from workers.models.config import read_config
from workers.models.decoder import Decoder, ForwardBatch, Hidden
from workers.models.kv_pool import KVPool
from workers.models.loader import load_decoder
from workers.models.mixers import GroupBatch
from workers.models.spec import ModelConfig

__all__ = ["Decoder", "ForwardBatch", "GroupBatch", "Hidden", "KVPool", "ModelConfig", "load_decoder", "read_config"]
