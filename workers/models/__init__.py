"""Checkpoints and the forward pass over page tables."""

from workers.models.config import ModelConfig
from workers.models.decoder import Decoder, ForwardBatch, KVPool
from workers.models.loader import load_decoder

__all__ = ["Decoder", "ForwardBatch", "KVPool", "ModelConfig", "load_decoder"]
