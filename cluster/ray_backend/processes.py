"""Processes of the cluster's nodes: how they end, how their death is noticed, and Ray's errors as our own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from typing import Any, NoReturn, TypeVar

import grpc
import psutil
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from holdfast.deadlines import within
from holdfast.errors import HoldfastError
from holdfast.processes import NodeProcess
from holdfast.silence import silent_for

log = logging.getLogger("holdfast.cluster")
RAYLET_CHECK_S = 0.5
END_GRACE_S = 1.0
"""Most processes end when Ray asks them to; stopped or hanging ones do not."""
END_TIMEOUT_S = 10.0
PROBES_PER_LEASE = 8
ANSWER_TIMEOUT_S = 5.0
"""What does not answer another supervisor for this long is started again."""
T = TypeVar("T")


def find_actor(name: str) -> Any:
    """The living actor of that name; None: there is none. Raises HoldfastError after a minute without a GCS."""
    try:
        with ray_errors(f"nobody knows whether {name} runs"):
            return ray.get_actor(name)
    except ValueError:
        return None


async def answer_of(call: Awaitable[T], timeout_s: float = ANSWER_TIMEOUT_S) -> T | None:
    """What an actor answers; None: it is dead, does not answer in time, or raised."""
    with contextlib.suppress(RayError, TimeoutError):
        return await within(timeout_s, call)
    return None


def actor_options(name: str, *, detached: bool) -> dict[str, Any]:
    """Ray lets no two actors of a name live. Of two supervisors that start the same thing, one fails."""
    return {"name": name, "lifetime": "detached"} if detached else {"name": name}


def living_nodes() -> set[str]:
    """The ids of the nodes that are alive."""
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


async def kill_actors(actors: Iterable[Any]) -> set[str]:
    """Have Ray kill actors. Returns the nodes that are alive, where their processes may have to be ended.

    In a thread: it waits for a GCS that is gone, and a supervisor renews its lease meanwhile.
    """

    def kill() -> set[str]:
        for actor in actors:
            ray.kill(actor)
        return living_nodes()

    return await asyncio.to_thread(kill)


def on_node(node: str, *, or_elsewhere: bool = False) -> NodeAffinitySchedulingStrategy:
    """Where an actor starts: on that node; with ``or_elsewhere``, on another once that one is lost.

    Ray's own choice between the two (``soft``) is a random node's, and one that has just joined may not know of the
    living node yet. What fails for that reason is tried again.
    """
    return NodeAffinitySchedulingStrategy(node, soft=or_elsewhere and node not in living_nodes())


async def end_on_node(process: NodeProcess) -> None:
    """``end_process`` on the process's node, which is alive. Raises HoldfastError."""
    if process.node_id == ray.get_runtime_context().get_node_id():
        await asyncio.to_thread(end_process, process.pid, process.created)
        return
    task = ray.remote(end_process).options(num_cpus=0, scheduling_strategy=on_node(process.node_id))
    failed = f"process {process.pid} on node {process.node_id[:8]} was not ended"
    try:
        with ray_errors(failed):
            await within(END_TIMEOUT_S, task.remote(process.pid, process.created))
    except TimeoutError:
        raise HoldfastError(f"{failed} within {END_TIMEOUT_S} s") from None


def end_process(pid: int, created: float) -> None:
    """Wait until a process of this node is gone, or kill it. Does nothing if its pid has been reused."""
    try:
        process = psutil.Process(pid)
        if process.create_time() != created:
            return
        try:
            process.wait(END_GRACE_S)
        except psutil.TimeoutExpired:
            process.kill()
            process.wait(END_TIMEOUT_S)
    except psutil.NoSuchProcess:
        pass


async def end_with_raylet(stopping: asyncio.Event) -> None:
    """End this process at once when the raylet that it has started is gone.

    Every process of the node ends with its raylet, and no other can join in its place: the whole node has to be
    started again. Unless it is ``stopping``: whoever stops it may have told the raylet too, which needs less time.
    """
    (raylet,) = (child for child in psutil.Process().children() if child.name() == "raylet")
    while runs(raylet):
        await asyncio.sleep(RAYLET_CHECK_S)
    if stopping.is_set():
        log.warning("the raylet has stopped before the cluster had, and all that ran on it")
        os._exit(0)
    end_at_once("the raylet of this machine is gone, and all that runs on it")


def end_at_once(reason: str) -> NoReturn:
    """End this process, and with it what it has started."""
    log.critical("%s", reason)
    os._exit(1)


def runs(process: psutil.Process) -> bool:
    """Whether a process runs: one that ended may stay a zombie."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


async def death_of(actor: Any, name: str) -> str:
    """Returns when an actor's process died or ended."""
    try:
        await actor.wait.remote()
    except RayError:
        return f"{name} died"
    return f"{name} ended"


async def first_of(*waits: Coroutine[Any, Any, str]) -> str:
    """The result of the first that returns; the others are cancelled."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for task in tasks:
            task.cancel()


async def unanswered_for(lease_s: float, probe: Callable[[], Awaitable[object]]) -> None:
    """Calls ``probe`` repeatedly; returns when it has not succeeded for a lease."""
    num_answers = 0

    async def ask() -> None:
        nonlocal num_answers
        while True:
            with contextlib.suppress(RayError, grpc.aio.AioRpcError):
                await probe()
                num_answers += 1
            await asyncio.sleep(lease_s / PROBES_PER_LEASE)

    asking = asyncio.create_task(ask())
    try:
        await silent_for(lease_s, lambda: num_answers)
    finally:
        asking.cancel()


@contextlib.contextmanager
def ray_errors(failed: str) -> Iterator[None]:
    """Raise HoldfastError for RayError; an actor's own HoldfastError as it is. ``failed``: what went wrong."""
    try:
        yield
    except RayError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, HoldfastError):
            raise cause from None
        raise HoldfastError(f"{failed}: {cause or error}") from None
