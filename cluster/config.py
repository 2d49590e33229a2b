"""The one configuration: a YAML file, every key also a flag of ``holdfast serve``."""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from holdfast.errors import ConfigError
from router.config import RouterConfig
from router.journal import MAX_SESSIONS_PER_TENANT, TOMBSTONE_RETENTION_S
from workers.config import BUNDLED_MODEL, EngineConfig


class Config(BaseModel):
    """Settings of a cluster. Where SGLang has the setting, the name is SGLang's."""

    model_config = ConfigDict(extra="forbid")

    model: Path = Field(BUNDLED_MODEL, description="checkpoint folder in Hugging Face layout")
    served_model_name: str | None = Field(None, description="name in the APIs; default: the folder's name")
    workers: int = Field(2, ge=1, le=1024, description="how many workers to start")
    tp: int = Field(1, ge=1, le=64, description="tensor parallelism: ranks, each with a GPU, in a worker")
    tp_placement: Literal["STRICT_PACK", "PACK", "SPREAD"] = Field(
        "STRICT_PACK", description="a worker's ranks on one node, on few, or on many"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where the model runs")
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = Field(
        "auto", description="auto: the checkpoint's on CUDA, float32 on CPU"
    )
    host: str = Field("127.0.0.1", description="address the router listens on")
    port: int = Field(8000, ge=0, le=65535, description="HTTP port; 0: any")
    grpc_port: int = Field(50051, ge=0, le=65535, description="gRPC port; 0: any")
    api_key: list[str] = Field([], description="accepted keys, each a tenant; none: open")
    address: str | None = Field(None, description="existing Ray cluster to join; default: a fresh local one")
    page_size: int = Field(16, description="tokens a KV page holds: a power of two from 1 to 256")
    context_length: int | None = Field(None, ge=2, description="longest sequence in tokens; default: the model's")
    max_total_tokens: int | None = Field(None, ge=2, description="KV capacity of a worker in tokens")
    chunked_prefill_size: int = Field(512, ge=1, description="tokens computed in a step")
    max_running_requests: int = Field(32, ge=1, description="turns in a worker's batch")
    max_queued_requests: int = Field(256, ge=1, description="turns that wait on a worker; more get 429")
    max_sessions: int = Field(1024, ge=2, description="sessions whose KV a worker keeps between turns")
    threads_per_worker: int | None = Field(None, ge=1, description="CPU threads a rank; default: cores shared out")
    journal_path: Path = Field(Path("holdfast.db"), description="the journal's SQLite file")
    journal_url: str | None = Field(None, description="redis://...: a journal for many machines")
    routers: int = Field(1, ge=1, le=64, description="routers over one journal; their ports count up from --port")
    journal_durability: Literal["process", "power"] = Field(
        "process", description="process: survives kill -9; power: fsync before a token is shown"
    )
    max_live_turns: int = Field(256, ge=1, description="turns that run or wait on the router; more get 429")
    max_turns_per_tenant: int | None = Field(
        None, ge=1, description="of those, one tenant's; default: half of them where there are several tenants"
    )
    max_sessions_per_tenant: int = Field(
        MAX_SESSIONS_PER_TENANT, ge=1, description="open sessions of a tenant; more get 429"
    )
    tombstone_retention_s: float = Field(
        TOMBSTONE_RETENTION_S, ge=60, description="how long a released session's id stays gone"
    )
    max_message_bytes: int = Field(16 * 1024 * 1024, ge=1024, description="size of a request; a larger one gets 413")
    turn_deadline_s: float = Field(3600.0, gt=0, description="how long a turn may take altogether before 504")
    max_failovers: int = Field(4, ge=0, description="workers that a turn may lose with no token between, before 500")
    max_queued_turns_per_session: int = Field(16, ge=0, description="turns that wait on one session; more get 429")
    worker_lease_s: float = Field(2.0, gt=0.5, description="silence after which a worker is taken for dead")
    worker_wait_s: float = Field(20.0, gt=0, description="wait for a live worker before 503")
    rank_lease_s: float = Field(2.0, gt=0.5, description="silence after which ranks take each other for dead")
    collective_timeout_s: float = Field(30.0, gt=0, description="deadline of a collective, and of ranks to meet")
    token_timeout_s: float = Field(120.0, gt=0, description="wait for a turn's next token before 504")
    control_timeout_s: float = Field(10.0, gt=0, description="deadline of release, free_tail, fork, audit")
    start_timeout_s: float = Field(120.0, gt=0, description="deadline for a worker to load its model and serve")
    handover_timeout_s: float = Field(60.0, ge=0, description="how long a drain goes on handing KV over")
    rebalance_per_s: float = Field(
        4.0, ge=0, description="sessions that may move in a second from a worker with many to one with few; 0: none"
    )
    drain_timeout_s: float = Field(5.0, ge=0, description="how long live turns may go on at shutdown")

    def engine(self) -> EngineConfig:
        """What each worker is told. Raises ConfigError."""
        if not 1 <= self.page_size <= 256 or self.page_size & (self.page_size - 1):
            raise ConfigError(f"page_size: must be a power of two from 1 to 256, not {self.page_size}")
        if self.max_running_requests > self.max_sessions:
            raise ConfigError("max_sessions: must be at least max_running_requests, each turn holds a slot")
        return EngineConfig(
            model=self.model.resolve(),
            device=self.device,
            dtype=self.dtype,
            page_size=self.page_size,
            context_length=self.context_length,
            max_total_tokens=self.max_total_tokens,
            chunked_prefill_size=self.chunked_prefill_size,
            max_running_requests=self.max_running_requests,
            max_queued_requests=self.max_queued_requests,
            max_sessions=self.max_sessions,
            num_threads=self.threads_per_worker or max(1, (os.cpu_count() or 1) // (self.workers * self.tp)),
            rank_lease_s=self.rank_lease_s,
            collective_timeout_s=self.collective_timeout_s,
        )

    def router(self, index: int = 0) -> RouterConfig:
        """What router number ``index`` is told."""
        return RouterConfig(
            model=self.model.resolve(),
            served_model_name=self.served_model_name or self.model.resolve().name,
            host=self.host,
            port=self.port and self.port + index,
            grpc_port=self.grpc_port and self.grpc_port + index,
            api_keys=tuple(self.api_key),
            journal_path=self.journal_path.resolve(),
            journal_url=self.journal_url,
            journal_durability=self.journal_durability,
            max_live_turns=self.max_live_turns,
            max_turns_per_tenant=self.max_turns_per_tenant,
            max_sessions_per_tenant=self.max_sessions_per_tenant,
            tombstone_retention_s=self.tombstone_retention_s,
            max_message_bytes=self.max_message_bytes,
            turn_deadline_s=self.turn_deadline_s,
            max_failovers=self.max_failovers,
            max_queued_turns_per_session=self.max_queued_turns_per_session,
            worker_lease_s=self.worker_lease_s,
            worker_wait_s=self.worker_wait_s,
            token_timeout_s=self.token_timeout_s,
            control_timeout_s=self.control_timeout_s,
            handover_timeout_s=self.handover_timeout_s,
            drain_timeout_s=self.drain_timeout_s,
        )


def load_config(file: Path | None, flags: dict[str, Any]) -> Config:
    """The file's keys, then the flags over them. Raises ConfigError, naming the key (and the nearest)."""
    values: dict[str, Any] = {}
    if file is not None:
        try:
            loaded = yaml.safe_load(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"config: cannot read {file}: {error.strerror}") from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"config: {file} is not valid YAML: {error}") from None
        if loaded is not None and not isinstance(loaded, dict):
            raise ConfigError(f"config: {file} must hold keys and values")
        values = {str(key).replace("-", "_"): value for key, value in (loaded or {}).items()}
    values |= flags
    for key in values:
        if key not in Config.model_fields:
            nearest = difflib.get_close_matches(key, Config.model_fields, 1, 0.0)
            raise ConfigError(f"config: unknown key {key!r}; the nearest valid key is {nearest[0]!r}")
    try:
        return Config(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{name}: {first['msg']} (given: {first['input']!r})") from None
