"""What runs for ``holdfast serve``: a Ray node's client that starts the cluster's supervisors, and waits.

The supervisors run on Ray. With ``--address`` they outlive this process, and ``holdfast stop`` ends what ``holdfast
serve --detach`` has left running; without, this process owns the Ray node that all runs on.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from cluster.cli.client import ray_address, url_option
from cluster.cli.progress import showing_progress
from cluster.config import Config
from cluster.guard import Generation
from cluster.ray_backend.nodes import keep_gcs_state, prepare_environment, use_token
from cluster.ray_backend.output import ray_output
from holdfast.errors import ConfigError, HoldfastError

if TYPE_CHECKING:
    from cluster.ray_backend.cluster import Charge
    from cluster.ray_backend.succession import Inheritance
    from cluster.ray_backend.supervisor_actor import SupervisorState

SUPERVISORS_CHECK_S = 2.0
OnRay: TypeAlias = Callable[[asyncio.Event], AbstractAsyncContextManager[asyncio.Event]]


async def serve_supervised(config: Config, on_ray: OnRay, generation: Generation, detach: bool = False) -> None:
    """Start the cluster, find it where it runs already, or take it over; wait for a signal, then stop it.

    ``on_ray``: this process is a client of Ray within. Is given what is set when it is to stop, and yields what is set
    when the cluster needs another Ray node. ``detach``: leave the cluster running as soon as it serves. Raises
    HoldfastError.
    """
    with ray_output(config.ray_log_path) as stdout:
        stop = asyncio.Event()
        async with on_ray(stop) as lost:
            from cluster.ray_backend.processes import end_at_once
            from cluster.ray_backend.succession import Inheritance
            from cluster.ray_backend.supervisor_actor import stop_cluster

            for number in (signal.SIGINT, signal.SIGTERM):  # after Ray has set its own
                asyncio.get_running_loop().add_signal_handler(number, stop.set)
            before = await Inheritance.of(generation.predecessor) if generation.predecessor is not None else None
            start = _start_or_attach(config) if before is None else _take_over(before)
            attached = await _first_of(start, stop, lost)
            if attached is not None:
                charge, state = attached
                click.echo(f"ready: {' '.join(state.urls)} {' '.join(state.grpc_urls)}", file=stdout)
                click.echo(f"Ray's messages: {config.ray_log_path}", file=stdout)
                if detach:
                    return
                taking = asyncio.create_task(before.take()) if before is not None else None
                supervisors: list[Any] = []
                await _first_of(keep_supervisors(charge, supervisors), stop, lost)
                if lost.is_set() and not stop.is_set():
                    if taking is not None:
                        taking.cancel()
                    await _hand_over(supervisors, generation, stop, config.drain_timeout_s)
            if lost.is_set():
                end_at_once("the GCS has lost its state, and nothing can be stopped in order")
            await stop_cluster()


async def _hand_over(
    supervisors: list[Any], generation: Generation, stop: asyncio.Event, drain_timeout_s: float
) -> None:
    """Hand the cluster over to its next generation. Then, or after the signal to stop, this process ends at once:
    Ray's client would wait for the GCS.
    """
    from cluster.ray_backend.succession import Bequest, hand_over

    bequest = Bequest(supervisors)
    await _first_of(hand_over(bequest, generation.ask_for_next), stop)
    await bequest.end_turns(drain_timeout_s)
    os._exit(0)


@click.command()
@click.option("--address", help="the Ray cluster that it runs on; default: the one that the router names")
@url_option
@click.option("--as-key", envvar="HOLDFAST_API_KEY", help="a key with the role operator, for the router")
@click.option("--force", is_flag=True, help="kill its processes, without a drain, when no supervisor leads")
def stop(address: str | None, url: str, as_key: str | None, force: bool) -> None:
    """Stop a cluster that `holdfast serve` has started: live turns are given drain_timeout_s to end.

    A `holdfast serve` that waits for it ends too.
    """
    asyncio.run(_stop_at(Config(address=address or ray_address(url, as_key)), force))


async def _stop_at(config: Config, force: bool) -> None:
    async with joined(config):
        from cluster.ray_backend.supervisor_actor import end_everything, stop_cluster

        if force:
            await end_everything()
        elif not await stop_cluster():
            raise HoldfastError(f"no cluster of Holdfast runs at {config.address}")


@contextlib.asynccontextmanager
async def joined(config: Config) -> AsyncIterator[asyncio.Event]:
    """This process is a client of the Ray cluster at ``config.address`` meanwhile. Raises ConfigError.

    Yields what nobody sets: its GCS is somebody else's affair.

    Import ``ray`` within: it reads the environment then.
    """
    prepare_environment()
    use_token()
    from cluster.ray_backend.connect import connect

    connect(config)
    import ray

    try:
        yield asyncio.Event()
    finally:
        ray.shutdown()


@contextlib.asynccontextmanager
async def own_node(config: Config, stop: asyncio.Event, gcs_storage: Path | None) -> AsyncIterator[asyncio.Event]:
    """This process has started a Ray node meanwhile, and is its client. Raises ConfigError, HoldfastError.

    ``gcs_storage``: a folder for the GCS's state, if its death is our affair. Yields what is set when that state is
    lost. When the node is lost, and with it all that runs here, this process ends at once: see
    ``end_with_raylet``. Import ``ray`` within.
    """
    prepare_environment()
    if gcs_storage is not None:
        keep_gcs_state(gcs_storage)
    from cluster.ray_backend.connect import connect
    from cluster.ray_backend.gcs import GcsKeeper
    from cluster.ray_backend.processes import end_at_once, end_with_raylet

    connect(config)
    import ray

    lost, loop = asyncio.Event(), asyncio.get_running_loop()
    keeper = None
    if gcs_storage is not None:
        keeper = GcsKeeper(on_lost=lambda: loop.call_soon_threadsafe(lost.set), on_another=end_at_once)
    watching = asyncio.create_task(end_with_raylet(stop))
    try:
        yield lost
    finally:
        watching.cancel()
        if keeper is not None:
            keeper.stop()
        ray.shutdown()


async def _first_of(work: Any, *events: asyncio.Event) -> Any:
    """The result of ``work``, or None after one of the events."""
    working, *waits = map(asyncio.ensure_future, (work, *(event.wait() for event in events)))
    try:
        await asyncio.wait((working, *waits), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, *waits):
            task.cancel()
        await asyncio.gather(working, *waits, return_exceptions=True)


async def keep_supervisors(charge: Charge, known: list[Any]) -> None:
    """Start a supervisor when there is none any more: each starts another, but both may be lost at once.

    ``known``: becomes those that were found last. Returns when the cluster was stopped.
    """
    from cluster.ray_backend.cluster import was_stopped
    from cluster.ray_backend.processes import answer_of, find_actor
    from cluster.ray_backend.supervisor_actor import SLOTS, start_supervisor

    while True:
        await asyncio.sleep(SUPERVISORS_CHECK_S)
        try:
            # In a thread: a call of Ray's waits for a GCS that is gone.
            found = [await asyncio.to_thread(find_actor, slot) for slot in SLOTS]
            known[:] = [actor for actor in found if actor is not None]
            supervisor = next(iter(known), None)
            if supervisor is None and await asyncio.to_thread(was_stopped):
                print("holdfast: the cluster was stopped", file=sys.stderr, flush=True)
                return
            if supervisor is None:
                await start_supervisor(charge, SLOTS[0], charge.node)
                continue
            charge = await answer_of(supervisor.charge.remote()) or charge  # an upgrade changes it
        except HoldfastError as error:
            print(f"holdfast: {error.message}", file=sys.stderr, flush=True)


async def _take_over(before: Inheritance) -> tuple[Charge, SupervisorState]:
    """Returns when the cluster's routers serve from here. Raises HoldfastError."""
    from cluster.ray_backend.supervisor_actor import SLOTS, start_supervisor, wait_until_ready

    charge = (await before.charge()).from_here()
    await start_supervisor(charge, SLOTS[0], charge.node)
    return charge, await wait_until_ready()


async def _start_or_attach(config: Config) -> tuple[Charge, SupervisorState]:
    """Returns when the cluster serves. Raises HoldfastError; a cluster that was started here has ended then."""
    from cluster.ray_backend.cluster import Charge
    from cluster.ray_backend.supervisor_actor import SLOTS, start_supervisor, stop_cluster, wait_until_ready

    running = await _running()
    if running is not None:
        _check_same(config, running.config)
        print("holdfast: the cluster runs already; attached to it", file=sys.stderr)
    charge = running or Charge.new(config)
    if running is None:
        await start_supervisor(charge, SLOTS[0], charge.node)
    try:
        async with showing_progress():
            return charge, await wait_until_ready()
    except HoldfastError:
        if running is None:
            await stop_cluster()
        raise


async def _running() -> Charge | None:
    """What the supervisors that there are lead with; None: there are none. Raises HoldfastError if none says it."""
    from cluster.ray_backend.processes import answer_of, find_actor
    from cluster.ray_backend.supervisor_actor import LEADER_WAIT_S, POLL_S, SLOTS, no_leader

    deadline = asyncio.get_running_loop().time() + LEADER_WAIT_S
    while supervisors := [actor for actor in map(find_actor, SLOTS) if actor is not None]:
        answers = await asyncio.gather(*(answer_of(supervisor.charge.remote()) for supervisor in supervisors))
        known: list[Charge] = [charge for charge in answers if charge is not None]
        if known:
            return known[0]
        if asyncio.get_running_loop().time() > deadline:
            raise no_leader()
        await asyncio.sleep(POLL_S)  # one that was never told of its cluster ends soon
    return None


def _check_same(given: Config, running: Config) -> None:
    """Raises ConfigError if the cluster that runs has other settings."""
    given = given.with_whole_paths()
    differ = [name for name in type(given).model_fields if getattr(given, name) != getattr(running, name)]
    if differ:
        raise ConfigError(
            f"{', '.join(differ)}: the cluster that runs at {given.address} has other settings; `holdfast stop` ends it"
        )
