"""A cluster on Ray: the supervisor, with actors as its components."""

from __future__ import annotations

import asyncio
import logging
import uuid
from dataclasses import dataclass, replace
from pathlib import Path

import ray
from ray.experimental import internal_kv

from cluster.authority import RENEW_S, Authority, SealedAuthority, read_issuer
from cluster.config import Config
from cluster.leadership import Leadership
from cluster.ray_backend.connect import LOOPBACK
from cluster.ray_backend.inherited import Inherited
from cluster.ray_backend.node_stores import NodeStores
from cluster.ray_backend.router_process import RouterProcess
from cluster.ray_backend.worker_group import WorkerGroup
from cluster.supervisor import Supervisor
from holdfast import tls
from holdfast.deadlines import within
from holdfast.errors import ConfigError, NoWorkerAvailable
from holdfast.tls import SUPERVISOR
from router.config import RouterConfig
from router.fleet.link import WorkerAddress
from workers.config import EngineConfig
from workers.store.folders import cluster_folder, remove_stale
from workers.store.server import DiskConfig

log = logging.getLogger("holdfast.cluster")
STOP_TIMEOUT_S = 2.0
RENEW_TIMEOUT_S = 30.0
GB = 1e9
CLUSTER_ID, STOPPED = b"holdfast:cluster-id", b"holdfast:stopped"


@dataclass(frozen=True, slots=True)
class Charge:
    """What all supervisors of a cluster know. ``node``: where its routers are; ``kv_folder``: of its KV stores;
    ``renew_s``: from one renewal of its certificates to the next; ``before``: what workers may still have that were not
    restarted since the last upgrade; ``ports``: of each router, HTTP and gRPC, once they have been chosen;
    ``inherited``: workers of the generation before, whose routers share their ports with this one's.
    """

    config: Config
    node: str
    kv_folder: Path
    authority: SealedAuthority | None
    renew_s: float = RENEW_S
    before: Config | None = None
    ports: tuple[tuple[int, int], ...] = ()
    inherited: tuple[Inherited, ...] = ()

    def router(self, index: int) -> RouterConfig:
        """The settings of router number ``index``."""
        config = self.config.router(index)
        if not self.ports:
            return config
        port, grpc_port = self.ports[index]
        return replace(config, port=port, grpc_port=grpc_port)

    def from_here(self) -> Charge:
        """The same cluster's, from this node."""
        return replace(self, node=ray.get_runtime_context().get_node_id())

    @classmethod
    def new(cls, config: Config) -> Charge:
        """Of a cluster that is to start, from this node. Raises ConfigError."""
        here = ray.get_runtime_context()
        cluster_id = _cluster_id() if config.address is not None else uuid.uuid4().hex
        authority = _authority(config, f"{cluster_id[:16]}.holdfast")
        return cls(
            config=config.with_whole_paths(),
            node=here.get_node_id(),
            kv_folder=cluster_folder(cluster_id[:12]),
            authority=authority.sealed() if authority is not None else None,
        )


def check_upgrade(running: Config, wanted: Config) -> None:
    """Raises ConfigError if they differ in more than what a worker's next incarnation can have."""
    wanted.check()
    for name in Config.model_fields:
        changed = running.model_copy(update={name: getattr(wanted, name)})
        if changed != running and (changed.engine() == running.engine() or changed.router() != running.router()):
            raise ConfigError(f"{name}: cannot change while the cluster runs; stop it, and serve again")


class Cluster:
    """Routers, workers, and their supervisor. Call ``connect`` first."""

    def __init__(self, charge: Charge | Config, leadership: Leadership | None = None) -> None:
        """``leadership``: of several supervisors, whose cluster outlives them; None: this process is the only one."""
        if isinstance(charge, Config):
            charge = Charge.new(charge)
        self.config = config = charge.config
        detached = leadership is not None
        self._authority = Authority.unsealed(charge.authority) if charge.authority is not None else None
        self._renewing: asyncio.Task[None] | None = None
        self._renew_s = charge.renew_s
        self._stores: NodeStores | None = None
        self._kv_folder = folder = charge.kv_folder
        if config.has_kv_store:
            remove_stale()
            self._stores = NodeStores(
                folder,
                self._store_bytes,
                _disk(config),
                ranks_on=lambda: [node for worker in self.workers for node in worker.nodes()],
                host=LOOPBACK if config.address is None else None,
                issue=self._issue,
                num_replicas=config.kv_replicas,
                write_bytes_per_s=config.kv_store_write_mb_per_s * 1e6,
                zeroes=config.zero_freed_pages,
                detached=detached,
            )
        engine = self._engine(config)
        num_ranks = config.workers * config.tp
        use_gpu = engine.device == "cuda" or (
            engine.device == "auto" and ray.cluster_resources().get("GPU", 0) >= num_ranks
        )
        self.routers = [
            RouterProcess(
                i,
                charge.router(i),
                self._issue,
                node=charge.node,
                detached=detached,
                shares_ports=bool(charge.inherited),
            )
            for i in range(config.routers)
        ]
        host = LOOPBACK if config.address is None else None
        self.workers = [
            WorkerGroup(
                f"worker-{i}",
                config.tp,
                engine,
                use_gpu=use_gpu,
                strategy=config.tp_placement,
                host=host,
                issue=self._issue,
                detached=detached,
                before=self._engine(charge.before) if charge.before is not None else None,
            )
            for i in range(config.workers)
        ]
        self._supervisor = Supervisor(
            self.workers,
            self.routers,
            start_timeout_s=config.start_timeout_s,
            rebalance_per_s=config.rebalance_per_s,
            stores=self._stores,
            leadership=leadership,
            inherited=charge.inherited,
            drain_timeout_s=config.drain_timeout_s,
        )

    @property
    def urls(self) -> list[str]:
        """The routers' HTTP addresses."""
        scheme = "https" if self.config.ssl_certfile is not None else "http"
        return [f"{scheme}://{router.config.host}:{router.config.port}" for router in self.routers]

    @property
    def grpc_urls(self) -> list[str]:
        """The routers' gRPC addresses."""
        return [f"grpc://{router.config.host}:{router.config.grpc_port}" for router in self.routers]

    @property
    def ports(self) -> tuple[tuple[int, int], ...]:
        """Of each router, HTTP and gRPC."""
        return tuple((router.config.port, router.config.grpc_port) for router in self.routers)

    @property
    def url(self) -> str:
        return self.urls[0]

    @property
    def grpc_url(self) -> str:
        return self.grpc_urls[0]

    def worker_addresses(self) -> list[WorkerAddress]:
        """The workers that serve now."""
        return self._supervisor.addresses()

    @property
    def num_inherited(self) -> int:
        """Workers of the generation before that serve yet."""
        return self._supervisor.num_inherited

    def to_inherit(self) -> tuple[Inherited, ...]:
        """The workers that serve now, for the next generation."""
        return tuple(worker.to_inherit() for worker in self.workers if worker.address is not None)

    async def start(self) -> None:
        """Start everything; returns when the routers reach every worker. Raises HoldfastError."""
        tls.use_identity(self._issue(SUPERVISOR))
        await self._supervisor.start()
        self._renewing = asyncio.create_task(self._renew())

    def actor_names(self) -> set[str]:
        """Of all its processes, as Ray knows them."""
        stores = self._stores.actor_names() if self._stores is not None else ()
        ranks = (name for worker in self.workers for name in worker.actor_names())
        return {*ranks, *(router.actor_name for router in self.routers), *stores}

    async def take_over(self) -> None:
        """Keep running what another supervisor has started, and start the rest: see ``wait_until_whole``.

        Where nothing serves, everything is started anew. Raises as ``start``.
        """
        tls.use_identity(self._issue(SUPERVISOR))
        if not await self._supervisor.adopt():
            await self.start()
            return
        # Nobody knows when they were renewed last.
        await self._renew_all()
        self._supervisor.keep()
        self._renewing = asyncio.create_task(self._renew())

    async def wait_until_whole(self) -> None:
        """Returns when everything serves, or when what does not has had the time of a start."""
        try:
            await self._supervisor.wait_until_whole()
        except NoWorkerAvailable as error:
            log.warning("not everything serves: %s", error)

    def reconfigure(self, config: Config) -> None:
        """Workers that start from now on have other settings: see ``check_upgrade``."""
        self.config = config
        for worker in self.workers:
            worker.reconfigure(self._engine(config))

    async def leave(self) -> None:
        """Stop supervising. Everything runs on."""
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
        await self._supervisor.stop()

    async def stop(self) -> None:
        """Give live turns ``drain_timeout_s`` to end, then end everything."""
        await self.leave()
        timeout_s = self.config.drain_timeout_s + STOP_TIMEOUT_S
        await asyncio.gather(*(router.stop(timeout_s) for router in self.routers))
        await asyncio.gather(*(worker.stop(STOP_TIMEOUT_S) for worker in self.workers))
        if self._stores is not None:
            await self._stores.stop()
        tls.use_identity(None)

    def _engine(self, config: Config) -> EngineConfig:
        engine = config.engine()
        return replace(engine, kv_store=self._kv_folder) if config.has_kv_store else engine

    def _store_bytes(self, node: str) -> int:
        """What a node's store is to have; 0 until it is known how much KV the node's workers hold."""
        if self.config.hicache_size:
            return int(self.config.hicache_size * GB)
        if any(worker.address is None for worker in self.workers):
            return 0
        return int(self.config.hicache_ratio * sum(worker.kv_bytes(node) for worker in self.workers))

    def _issue(self, role: str) -> tls.Identity | None:
        return self._authority.issue(role) if self._authority is not None else None

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._renew_s)
            await self._renew_all()

    async def _renew_all(self) -> None:
        """Give all processes new certificates, long before those they have expire. Streams go on."""
        tls.use_identity(self._issue(SUPERVISOR))
        renews = [*(router.renew for router in self.routers), *(worker.renew for worker in self.workers)]
        if self._stores is not None:
            renews.append(self._stores.renew)
        # One that does not answer is started again by the supervisor, with a new certificate.
        renewals = (within(RENEW_TIMEOUT_S, renew()) for renew in renews)
        for result in await asyncio.gather(*renewals, return_exceptions=True):
            if isinstance(result, Exception):
                log.warning("a certificate was not renewed: %r", result)


def _cluster_id() -> str:
    """A name that no other cluster has, and that is the same when all supervisors were lost and this process starts
    others: what runs knows it. The GCS keeps it.
    """
    internal_kv._internal_kv_del(STOPPED)  # it runs again
    internal_kv._internal_kv_put(CLUSTER_ID, uuid.uuid4().hex.encode(), overwrite=False)
    kept: bytes = internal_kv._internal_kv_get(CLUSTER_ID)
    return kept.decode()


def was_stopped() -> bool:
    """Whether the cluster that ran on this Ray cluster was stopped on purpose. A GCS that lost its state knows not."""
    return internal_kv._internal_kv_get(STOPPED) is not None


def note_stop() -> None:
    """The cluster has stopped: see ``was_stopped``."""
    internal_kv._internal_kv_put(STOPPED, b"")


def _authority(config: Config, name: str) -> Authority | None:
    """Raises ConfigError."""
    if config.insecure_internal:
        return None
    if config.tls_ca is None or config.tls_cert is None or config.tls_key is None:
        return Authority(name=name)
    return Authority(issuer=read_issuer(config.tls_ca, config.tls_cert, config.tls_key), name=name)


def _disk(config: Config) -> DiskConfig | None:
    if config.kv_disk_path is None:
        return None
    return DiskConfig(config.kv_disk_path.resolve(), int(config.kv_disk_size * GB))
