"""The one configuration: a YAML file, every key also a flag of ``holdfast serve``."""

from __future__ import annotations

import difflib
import ipaddress
import os
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from holdfast.errors import ConfigError
from router.access.keys import ROLES, given_key
from router.config import RouterConfig
from router.journal.interface import MAX_SESSIONS_PER_TENANT, TOMBSTONE_RETENTION_S
from router.tracing import check_tracing
from workers.config import BUNDLED_MODEL, EngineConfig

MAX_PORT = 65535
JOURNAL_URL = "HOLDFAST_JOURNAL_URL"
SECRETS = {"api_key": "HOLDFAST_API_KEYS", "admin_api_key": "HOLDFAST_ADMIN_API_KEYS"}
"""What is not given on a command line, which everybody on the machine can read, and the variables to give it in."""


class Config(BaseModel):
    """Settings of a cluster. Settings that SGLang has too have SGLang's names."""

    model_config = ConfigDict(extra="forbid")

    model: Path = Field(BUNDLED_MODEL, description="checkpoint folder in Hugging Face layout")
    served_model_name: str | None = Field(None, description="name in the APIs; default: the folder's name")
    workers: int = Field(2, ge=1, le=1024, description="how many workers to start")
    tp: int = Field(1, ge=1, le=64, description="tensor parallelism: ranks, each with a GPU, in a worker")
    tp_placement: Literal["STRICT_PACK", "PACK", "SPREAD"] = Field(
        "STRICT_PACK", description="a worker's ranks on one node, on few, or on many"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="device of the ranks")
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = Field(
        "auto",
        description="of activations; auto: the checkpoint's on CUDA, float32 with the checkpoint's weights on CPU",
    )
    kv_cache_dtype: Literal["auto", "fp8_e4m3"] = Field(
        "auto", description="KV as the model's dtype, or in 8 bits, with the checkpoint's scales if it has some"
    )
    quantization: Literal["int8"] | None = Field(
        None, description="int8: layers' weights in 8 bits on CPU, a factor for each output channel"
    )
    attention_backend: Literal["auto", "torch_native", "triton", "cpu"] = Field(
        "auto", description="kernels; auto: triton on CUDA; on CPU its own if there is a C++ compiler, else torch"
    )
    deterministic: bool = Field(
        True, description="on CUDA, the same tokens in any batch; else products are torch's, and prefills faster"
    )
    tile_table: Path | None = Field(None, description="a GPU's tiles, as `holdfast tune` measured them; else by rule")
    disable_overlap_schedule: bool | None = Field(
        None, description="a step is planned when the one before is done; default: on CPU alone"
    )
    disable_cuda_graph: bool = Field(False, description="on CUDA, launch each kernel of a decode from Python")
    cuda_graph_max_bs: int = Field(256, ge=1, description="largest batch whose decode is captured as a CUDA graph")
    speculative_algorithm: Literal["NONE", "NGRAM", "STANDALONE", "EAGLE3", "MTP"] = Field(
        "NONE",
        description="drafts, never another output; NGRAM: looked up; STANDALONE: of a smaller model; EAGLE3: of a head "
        "of the model; MTP: of the one in its checkpoint",
    )
    speculative_draft_model_path: Path | None = Field(
        None, description="checkpoint of STANDALONE's smaller model, or of EAGLE3's head"
    )
    speculative_num_draft_tokens: int = Field(
        16, ge=1, le=64, description="tokens that a step verifies for a turn, at most; fewer where more do not pay"
    )
    tool_call_parser: str | None = Field(None, description="how the model writes calls; default: by its chat template")
    reasoning_parser: str | None = Field(
        None, description="how the model writes reasoning; default: by its chat template"
    )
    grammar_timeout_s: float = Field(10.0, gt=0, description="deadline to compile a request's schema or grammar")
    host: str = Field("127.0.0.1", description="address the router listens on")
    port: int = Field(8000, ge=0, le=MAX_PORT, description="HTTP port; 0: any")
    grpc_port: int = Field(50051, ge=0, le=MAX_PORT, description="gRPC port; 0: any")
    api_key: list[str] = Field([], description="accepted keys, each a tenant; HOLDFAST_API_KEYS has them too")
    admin_api_key: list[str] = Field(
        [], description="accepted keys with every role; HOLDFAST_ADMIN_API_KEYS has them too"
    )
    api_key_file: Path | None = Field(
        None, description="file of accepted keys, as holdfast keys writes it; it is read again when it changes"
    )
    audit_log: Path | None = Field(None, description="file to which lines are added of what operators do, as JSON")
    ssl_certfile: Path | None = Field(
        None, description="TLS for clients, over HTTP and gRPC: certificate with its chain"
    )
    ssl_keyfile: Path | None = Field(None, description="the certificate's key; new files are taken over while serving")
    tls_ca: Path | None = Field(
        None, description="root certificate between processes, instead of an authority of the cluster's own"
    )
    tls_cert: Path | None = Field(
        None, description="certificate of an authority under --tls-ca, or --tls-ca itself, which issues the processes'"
    )
    tls_key: Path | None = Field(None, description="its key; only the process of `holdfast serve` reads it")
    insecure_internal: bool = Field(
        False, description="clear text between routers, workers and stores, and nobody is asked who they are"
    )
    log_format: Literal["text", "json"] = Field(
        "text", description="of what processes log: lines, or JSON with session_id and turn_id, from info on"
    )
    otlp_traces_endpoint: str | None = Field(
        None, description="URL that turns' traces are sent to, with OTLP over HTTP: http://collector:4318/v1/traces"
    )
    no_auth: bool = Field(False, description="serve others than this machine without any key")
    address: str | None = Field(None, description="existing Ray cluster to join; default: a fresh local one")
    page_size: int = Field(16, description="tokens a KV page holds: a power of two from 1 to 256")
    context_length: int | None = Field(None, ge=2, description="longest sequence in tokens; default: the model's")
    max_total_tokens: int | None = Field(None, ge=2, description="KV capacity of a worker in tokens")
    mem_fraction_static: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="of a GPU's memory, for weights and KV; the rest is for CUDA graphs and activations; default: KV "
        "gets 85 % of what the weights leave",
    )
    zero_freed_pages: bool = Field(False, description="overwrite KV that is freed, on devices and in --hicache-size")
    hicache_size: float = Field(
        0.0, ge=0, description="GB of memory on each node for copies of KV, which outlive workers; 0: none"
    )
    hicache_ratio: float = Field(
        0.0, ge=0, description="the same as a multiple of the KV that a node's workers hold; --hicache-size goes first"
    )
    kv_disk_path: Path | None = Field(
        None, description="folder on each node for more copies, which outlive the cluster too; needs --hicache-size"
    )
    kv_disk_size: float = Field(0.0, ge=0, description="GB of --kv-disk-path on each node")
    kv_replicas: int = Field(
        1, ge=0, le=8, description="other nodes that each node's copies of KV are copied to, for when a node dies"
    )
    kv_store_write_mb_per_s: float = Field(
        1000.0,
        gt=0,
        description="what a rank's copying of KV may take of the memory's bandwidth, and a node's of the network's",
    )
    swa_full_tokens_ratio: float | None = Field(
        None, gt=0, le=1, description="sliding windows' KV capacity over that of full attention; default: computed"
    )
    resume_points: int = Field(
        1, ge=0, le=64, description="turns whose starts a session can go back to behind a sliding window"
    )
    ep: bool = Field(False, description="the ranks of a worker divide the experts, not each expert's width")
    chunked_prefill_size: int | None = Field(
        None, ge=1, description="tokens computed in a step; default: 512 on CPU, 8192 on a large GPU"
    )
    max_running_requests: int = Field(32, ge=1, description="turns in a worker's batch")
    max_queued_requests: int = Field(256, ge=1, description="turns that wait on a worker; beyond it 429")
    max_sessions: int = Field(1024, ge=2, description="sessions whose KV a worker keeps between turns")
    threads_per_worker: int | None = Field(
        None, ge=1, description="CPU threads a rank; default: the cores divided by the ranks"
    )
    journal_path: Path = Field(Path("holdfast.db"), description="the journal's SQLite file")
    ray_log: Path | None = Field(
        None, description="file for Ray's messages; default: holdfast-ray.log beside the journal"
    )
    journal_url: str | None = Field(
        None,
        description=f"redis(s)://...: a journal for routers on many machines; one with a password: {JOURNAL_URL}",
    )
    routers: int = Field(
        1, ge=1, le=64, description="routers over one journal, on consecutive ports from --port and --grpc-port on"
    )
    journal_durability: Literal["process", "power"] = Field(
        "process", description="process: survives kill -9; power: fsync before a token is shown"
    )
    max_live_turns: int = Field(256, ge=1, description="turns that run or wait on a router; beyond it 429")
    max_turns_per_tenant: int | None = Field(
        None, ge=1, description="the same of one tenant; default: half of all if there are several tenants"
    )
    max_sessions_per_tenant: int = Field(
        MAX_SESSIONS_PER_TENANT, ge=1, description="open sessions of a tenant; beyond it 429"
    )
    tombstone_retention_s: float = Field(
        TOMBSTONE_RETENTION_S, ge=60, description="how long the id of a released session cannot be used again"
    )
    max_message_bytes: int = Field(16 * 1024 * 1024, ge=1024, description="size of a request; beyond it 413")
    max_file_bytes: int = Field(100 * 1024 * 1024, ge=1024, description="size of a file for batches; beyond it 413")
    max_connections: int = Field(8192, ge=1, description="open HTTP connections of a router; beyond it 503")
    client_timeout_s: float = Field(
        30.0, gt=0, description="how long a client may take to send a request, or to read what it is sent"
    )
    turn_deadline_s: float = Field(3600.0, gt=0, description="duration of a turn; beyond it 504")
    max_failovers: int = Field(4, ge=0, description="failovers of a turn without a token in between; beyond it 500")
    max_queued_turns_per_session: int = Field(16, ge=0, description="turns that wait for one session; beyond it 429")
    worker_lease_s: float = Field(2.0, gt=0.5, description="silence after which a worker is considered lost")
    worker_wait_s: float = Field(20.0, gt=0, description="how long a turn waits for a living worker; beyond it 503")
    rank_lease_s: float = Field(2.0, gt=0.5, description="silence between ranks after which they end")
    collective_timeout_s: float = Field(30.0, gt=0, description="deadline of a collective, and of the ranks to connect")
    token_timeout_s: float = Field(120.0, gt=0, description="how long a turn waits for its next token; beyond it 504")
    control_timeout_s: float = Field(10.0, gt=0, description="deadline of release, free_tail, fork, audit")
    start_timeout_s: float = Field(120.0, gt=0, description="deadline for a worker to load its model and serve")
    migration_timeout_s: float = Field(60.0, ge=0, description="how long a drain migrates KV")
    rebalance_per_s: float = Field(
        4.0, ge=0, description="sessions a second that may migrate from a worker with many to one with few; 0: none"
    )
    drain_timeout_s: float = Field(5.0, ge=0, description="how long live turns may continue at shutdown")

    @property
    def has_kv_store(self) -> bool:
        return bool(self.hicache_size or self.hicache_ratio)

    def check(self) -> None:
        """Check what no single field can. Raises ConfigError."""
        if not (self.model / "config.json").is_file():
            raise ConfigError(f"model: {self.model} is not a checkpoint folder (it has no config.json)")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ConfigError("ssl_certfile, ssl_keyfile: TLS needs both")
        if len({self.tls_ca is None, self.tls_cert is None, self.tls_key is None}) > 1:
            raise ConfigError("tls_ca, tls_cert, tls_key: an authority for the cluster's processes needs all three")
        if self.tls_ca is not None and self.insecure_internal:
            raise ConfigError("insecure_internal: there are no certificates in clear text, so no tls_ca")
        if (self.kv_disk_path is not None) != (self.kv_disk_size > 0):
            raise ConfigError("kv_disk_path, kv_disk_size: a disk for copies of KV needs both")
        if self.kv_disk_path is not None and not self.has_kv_store:
            raise ConfigError("kv_disk_path: needs hicache_size or hicache_ratio, for copies go to disk from memory")
        if self.otlp_traces_endpoint is not None:
            check_tracing()
        if not (self.api_key or self.admin_api_key or self.api_key_file or self.no_auth or _is_loopback(self.host)):
            raise ConfigError(
                f"host: {self.host} can be reached by others, who could do everything: set api_key_file "
                "(holdfast keys create), or no_auth"
            )
        http = range(self.port, self.port + self.routers if self.port else 0)
        grpc = range(self.grpc_port, self.grpc_port + self.routers if self.grpc_port else 0)
        if set(http) & set(grpc):
            raise ConfigError(
                f"port, grpc_port: with routers {self.routers}, HTTP ports {http[0]}-{http[-1]} and gRPC ports "
                f"{grpc[0]}-{grpc[-1]} overlap"
            )
        last = max(http[-1] if http else 0, grpc[-1] if grpc else 0)
        if last > MAX_PORT:
            raise ConfigError(f"port, grpc_port: with routers {self.routers}, port {last} is above {MAX_PORT}")

    @property
    def ray_log_path(self) -> Path:
        """The file for what Ray prints."""
        return (self.ray_log or self.journal_path.with_name("holdfast-ray.log")).resolve()

    def with_whole_paths(self) -> Config:
        """The same for a process in another folder."""
        return self.model_copy(update={name: value.resolve() for name, value in self if isinstance(value, Path)})

    def engine(self) -> EngineConfig:
        """The settings of each rank. Raises ConfigError."""
        if not 1 <= self.page_size <= 256 or self.page_size & (self.page_size - 1):
            raise ConfigError(f"page_size: must be a power of two from 1 to 256, not {self.page_size}")
        if self.max_running_requests > self.max_sessions:
            raise ConfigError("max_sessions: must be at least max_running_requests, because each turn owns a slot")
        return EngineConfig(
            model=self.model.resolve(),
            device=self.device,
            dtype=self.dtype,
            deterministic=self.deterministic,
            kv_cache_dtype=self.kv_cache_dtype,
            quantization=self.quantization,
            attention_backend=self.attention_backend,
            tile_table=self.tile_table and self.tile_table.resolve(),
            overlap_schedule=None if self.disable_overlap_schedule is None else not self.disable_overlap_schedule,
            disable_cuda_graph=self.disable_cuda_graph,
            cuda_graph_max_bs=self.cuda_graph_max_bs,
            speculative_algorithm=self.speculative_algorithm,
            speculative_draft_model_path=self.speculative_draft_model_path
            and self.speculative_draft_model_path.resolve(),
            speculative_num_draft_tokens=self.speculative_num_draft_tokens,
            page_size=self.page_size,
            context_length=self.context_length,
            max_total_tokens=self.max_total_tokens,
            mem_fraction_static=self.mem_fraction_static,
            swa_full_tokens_ratio=self.swa_full_tokens_ratio,
            zero_freed_pages=self.zero_freed_pages,
            resume_points=self.resume_points,
            expert_parallel=self.ep,
            grammar_timeout_s=self.grammar_timeout_s,
            chunked_prefill_size=self.chunked_prefill_size,
            max_running_requests=self.max_running_requests,
            max_queued_requests=self.max_queued_requests,
            max_sessions=self.max_sessions,
            kv_store_write_mb_per_s=self.kv_store_write_mb_per_s,
            num_threads=self.threads_per_worker or max(1, (os.cpu_count() or 1) // (self.workers * self.tp)),
            rank_lease_s=self.rank_lease_s,
            collective_timeout_s=self.collective_timeout_s,
        )

    def router(self, index: int = 0) -> RouterConfig:
        """The settings of router number ``index``."""
        return RouterConfig(
            model=self.model.resolve(),
            served_model_name=self.served_model_name or self.model.resolve().name,
            tool_call_parser=self.tool_call_parser,
            reasoning_parser=self.reasoning_parser,
            host=self.host,
            port=self.port and self.port + index,
            grpc_port=self.grpc_port and self.grpc_port + index,
            api_keys=(*map(given_key, self.api_key), *(given_key(key, ROLES) for key in self.admin_api_key)),
            api_key_file=self.api_key_file and self.api_key_file.resolve(),
            audit_log=self.audit_log and self.audit_log.resolve(),
            ssl_certfile=self.ssl_certfile and self.ssl_certfile.resolve(),
            ssl_keyfile=self.ssl_keyfile and self.ssl_keyfile.resolve(),
            otlp_traces_endpoint=self.otlp_traces_endpoint,
            journal_path=self.journal_path.resolve(),
            journal_url=self.journal_url,
            journal_durability=self.journal_durability,
            max_live_turns=self.max_live_turns,
            max_turns_per_tenant=self.max_turns_per_tenant,
            max_sessions_per_tenant=self.max_sessions_per_tenant,
            tombstone_retention_s=self.tombstone_retention_s,
            max_message_bytes=self.max_message_bytes,
            max_file_bytes=self.max_file_bytes,
            max_connections=self.max_connections,
            client_timeout_s=self.client_timeout_s,
            turn_deadline_s=self.turn_deadline_s,
            max_failovers=self.max_failovers,
            max_queued_turns_per_session=self.max_queued_turns_per_session,
            worker_lease_s=self.worker_lease_s,
            worker_wait_s=self.worker_wait_s,
            token_timeout_s=self.token_timeout_s,
            control_timeout_s=self.control_timeout_s,
            migration_timeout_s=self.migration_timeout_s,
            drain_timeout_s=self.drain_timeout_s,
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def load_config(file: Path | None, flags: dict[str, Any]) -> Config:
    """The file's keys, overridden by the flags. Raises ConfigError, which names the key."""
    values: dict[str, Any] = {}
    if file is not None:
        try:
            loaded = yaml.safe_load(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"config: cannot read {file}: {error.strerror}") from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"config: {file} is not valid YAML: {error}") from None
        if loaded is not None and not isinstance(loaded, dict):
            raise ConfigError(f"config: {file} must contain keys and values")
        values = {str(key).replace("-", "_"): value for key, value in (loaded or {}).items()}
    values |= flags
    for key, variable in SECRETS.items():
        # Taken out: Ray's processes need not inherit it.
        from_environment = os.environ.pop(variable, "").split()
        if from_environment:
            values[key] = [*values.get(key, []), *from_environment]
    journal_url = os.environ.pop(JOURNAL_URL, "")
    if journal_url:
        values.setdefault("journal_url", journal_url)
    for key in values:
        if key not in Config.model_fields:
            nearest = difflib.get_close_matches(key, Config.model_fields, 1, 0.0)
            raise ConfigError(f"config: unknown key {key!r}; the nearest valid key is {nearest[0]!r}")
    try:
        config = Config(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{name}: {first['msg']} (given: {first['input']!r})") from None
    config.check()
    return config
