"""What fails beyond ranks, leaders and routers: nodes, their network, supervisors, Ray's GCS, each Redis."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import cycle

import psutil
import ray

from cluster.chaos.faults import Fault
from cluster.ray_backend.processes import answer_of, find_actor, runs
from cluster.ray_backend.supervisor_actor import SLOTS, find_leader
from tests.chaos.nodes import Node
from tests.hosts import Host
from tests.redis_server import RedisServer

REDIS_DOWN_S = 1.0
CUTS_S = (1.0, 4.0)
"""Shorter and longer than the leases."""
SUPERVISOR_STOPS_S = (2.0, 8.0)
"""Shorter and longer than its lease."""
GCS_STOPS_S = (2.0, 8.0)
LEADER_POLL_S = 0.2


def faults_of(redis: RedisServer, of_gcs: RedisServer | None, nodes: Sequence[Node]) -> list[Fault]:
    """Those of a cluster on these nodes, whose head this process has started. ``of_gcs``: its GCS's Redis, if any."""
    machines = [node.host for node in nodes if node.host is not None]
    nodes_in_turn, hosts_in_turn = cycle(nodes), cycle([[host] for host in machines])

    async def kill_node() -> None:
        next(nodes_in_turn).kill()

    faults: list[Fault] = [
        ("kill -9 of Redis", partial(_kill_redis, redis)),
        ("kill -9 of a node: raylet and all", kill_node),
        ("kill -9 of the GCS", partial(_fail_gcs, 0.0)),
        ("kill -9 of the supervisor that leads", partial(_fail_supervisor, 0.0)),
        ("kill -9 of both supervisors", _kill_supervisors),
        ("kill -9 of the GCS and of both supervisors", _kill_control_plane),
    ]
    if of_gcs is not None:
        faults.append(("kill -9 of the GCS's Redis", partial(_kill_redis_of_gcs, of_gcs)))
    faults += [(f"SIGSTOP of the GCS, {s} s", partial(_fail_gcs, s)) for s in GCS_STOPS_S]
    faults += [
        (f"SIGSTOP of the supervisor that leads, {s} s", partial(_fail_supervisor, s)) for s in SUPERVISOR_STOPS_S
    ]
    if machines:
        faults += [(f"a node is cut off for {s} s", partial(_cut_off, hosts_in_turn, s)) for s in CUTS_S]
        faults += [(f"the head is cut off for {s} s", partial(_cut_off, cycle([machines]), s)) for s in CUTS_S]
    return faults


def gcs_servers() -> list[psutil.Process]:
    """Those that this process has started and that run."""
    return [child for child in psutil.Process().children() if child.name() == "gcs_server" and runs(child)]


async def _kill_redis(redis: RedisServer) -> None:
    redis.kill()
    await asyncio.sleep(REDIS_DOWN_S)
    await asyncio.to_thread(redis.start)


async def _cut_off(in_turn: Iterator[list[Host]], seconds: float) -> None:
    cut = next(in_turn)
    for host in cut:
        host.cut()
    await asyncio.sleep(seconds)
    for host in cut:
        host.heal()


async def _fail_supervisor(stops_s: float) -> None:
    """Kill the one that leads, or stop it. Within the lease it leads on; later it finds another that leads."""
    process = None
    while process is None:
        found = await find_leader()
        process = await answer_of(found[0].process.remote()) if found is not None else None
        await asyncio.sleep(LEADER_POLL_S)
    with suppress(ProcessLookupError):
        if not stops_s:
            os.kill(process.pid, signal.SIGKILL)
            return
        os.kill(process.pid, signal.SIGSTOP)
        await asyncio.sleep(stops_s)
        os.kill(process.pid, signal.SIGCONT)


async def _kill_supervisors() -> None:
    for slot in SLOTS:
        actor = find_actor(slot)
        process = await answer_of(actor.process.remote()) if actor is not None else None
        if process is not None:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)


async def _kill_control_plane() -> None:
    await _kill_supervisors()
    await _fail_gcs(0.0)


async def _kill_redis_of_gcs(redis: RedisServer) -> None:
    """Its GCS dies with it; returns when another answers."""
    await _kill_redis(redis)
    await asyncio.to_thread(ray.nodes)


async def _fail_gcs(stops_s: float) -> None:
    """Kill it, or stop it; returns when one answers."""
    (gcs,) = gcs_servers()
    if stops_s:
        gcs.suspend()
        await asyncio.sleep(stops_s)
        gcs.resume()
    else:
        gcs.kill()
    await asyncio.to_thread(ray.nodes)
