"""How a cluster goes over to a Ray node of its own beside the one that it runs on, whose GCS has lost its state.

Without its GCS a Ray node serves on, and starts nothing any more. So the process that owns it asks for another, the
next generation's. That one starts a Ray node, and its supervisors take what the one before hands over
(``Charge.inherited``): routers first, on the same ports; then worker after worker, to which sessions migrate. Of the
node before, routers serve until their last turns have ended. Then its owner ends, with all that is left there.

The two talk over a connection of their own: neither knows of the other's Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
from pydantic import TypeAdapter
from ray.exceptions import RayError

from cluster.ray_backend.cluster import Charge
from cluster.ray_backend.processes import answer_of, end_at_once, ray_errors
from cluster.ray_backend.supervisor_actor import SupervisorState, find_leader
from holdfast.errors import HoldfastError, NoWorkerAvailable
from router.fleet.link import WorkerAddress
from workers.store.folders import node_folder

log = logging.getLogger("holdfast.cluster")
RETRY_S = 5.0
HAND_OVER_S = 60.0
POLL_S = 0.2
SIZE_BYTES = 8
TITLE = "ray::SupervisorActor"
"""As Ray names the processes of supervisors."""


@dataclass(frozen=True, slots=True)
class Request:
    """What the next generation asks for. ``workers``, ``epoch``: those that it announces."""

    word: Literal["hand over", "announce", "retire", "end"]
    workers: tuple[WorkerAddress, ...] = ()
    epoch: int = 0


REQUEST, CHARGE = TypeAdapter(Request), TypeAdapter(Charge)
DONE, NOT_DONE = b"done", b"not done"
"""Answers: whether no turn is left at the routers before."""


class Bequest:
    """What an owner hands over. ``supervisors``: those it knows: they cannot be looked up when there is no GCS."""

    def __init__(self, supervisors: list[Any]) -> None:
        self._supervisors = supervisors
        self._leader: Any = None
        self._charge: Charge | None = None
        self._retiring: asyncio.Task[None] | None = None

    async def serve(self, link: socket.socket) -> None:
        """Do what the next generation asks for; returns when nothing is left to do here.

        Raises EOFError if it was lost, HoldfastError if there is nobody here who could hand over.
        """
        reader, writer = await asyncio.open_connection(sock=link)
        try:
            while (asked := REQUEST.validate_json(await _receive(reader))).word != "end":
                _send(writer, await self._do(asked))
        finally:
            writer.close()

    @property
    def is_accepted(self) -> bool:
        """Whether the next generation serves, and new turns are its own."""
        return self._retiring is not None

    async def end_turns(self, timeout_s: float) -> None:
        """Give the turns that still run here time to end."""
        if self._retiring is not None:
            await asyncio.wait((self._retiring,), timeout=timeout_s)

    async def _do(self, asked: Request) -> bytes:
        if asked.word == "hand over":
            return CHARGE.dump_json(await self._hand_over())
        if asked.word == "announce":
            with contextlib.suppress(RayError):  # if it died, turns that lose their worker are resumed elsewhere
                await self._leader.announce.remote(list(asked.workers), asked.epoch)
        elif self._retiring is None:
            self._retiring = asyncio.ensure_future(_of(self._leader.retire.remote()))
        return DONE if self._retiring is not None and self._retiring.done() else NOT_DONE

    async def _hand_over(self) -> Charge:
        """The same each time: a next generation may have been lost as soon as it had asked."""
        if self._charge is None:
            self._leader = await self._find_leader()
            try:
                async with asyncio.timeout(HAND_OVER_S):
                    with ray_errors("the cluster is not handed over"):
                        _end_supervisors(but=(await self._leader.process.remote()).pid)
                        self._charge = await self._leader.hand_over.remote()
            except TimeoutError:
                raise NoWorkerAvailable(f"the cluster is not handed over within {HAND_OVER_S:g} s") from None
        assert self._charge is not None
        return self._charge

    async def _find_leader(self) -> Any:
        for supervisor in self._supervisors:
            state: SupervisorState | None = await answer_of(supervisor.state.remote())
            if state is not None and state.epoch:
                return supervisor
        raise NoWorkerAvailable("no supervisor is known that leads")


async def hand_over(bequest: Bequest, ask_for_next: Callable[[], socket.socket]) -> None:
    """Hand over to one next generation or another; returns when nothing is left to do here.

    Where that cannot be done, this process ends at once: all that ran here is started again.
    """
    while True:
        try:
            await bequest.serve(ask_for_next())
            log.warning("the next generation has everything; this one ends")
            return
        except (EOFError, ConnectionError):
            if bequest.is_accepted:
                end_at_once("the next generation is lost")
            log.warning("the next generation has not started; asking for another")
            await asyncio.sleep(RETRY_S)
        except HoldfastError as error:
            end_at_once(f"the GCS has lost its state, and {error.message}")


class Inheritance:
    """What the next generation takes over."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._kv_folder: Path | None = None

    @classmethod
    async def of(cls, predecessor: socket.socket) -> Inheritance:
        return cls(*await asyncio.open_connection(sock=predecessor))

    async def charge(self) -> Charge:
        """What this generation leads with. This process ends at once if nobody answers."""
        try:
            charge = CHARGE.validate_json(await self._ask(Request("hand over")))
        except (EOFError, ConnectionError):
            end_at_once("the generation before is lost")
        self._kv_folder = node_folder(charge.kv_folder, charge.node)
        return charge

    async def take(self) -> None:
        """Returns when nothing of the generation before is needed any more, or it was lost. Call when this one serves:
        new turns are its own from now on.
        """
        try:
            done = False
            while not done:
                done = await self._ask(Request("retire")) == DONE
                done = await self._tell_workers() and done
                await asyncio.sleep(POLL_S)
            _send(self._writer, REQUEST.dump_json(Request("end")))
            await self._writer.drain()
        except (EOFError, ConnectionError) as error:
            log.warning("the generation before is lost: %r", error)
        finally:
            self._writer.close()
        if self._kv_folder is not None:  # its store is killed with its node: nobody there removes the arena
            await asyncio.to_thread(shutil.rmtree, self._kv_folder, ignore_errors=True)

    async def _tell_workers(self) -> bool:
        """Returns whether all are this generation's."""
        try:
            found = await find_leader()
            if found is None:
                return False
            workers = await found[0].workers.remote()
        except (RayError, HoldfastError) as error:
            log.info("the workers are not known: %s", error)
            return False
        await self._ask(Request("announce", workers.addresses, workers.epoch))
        return not workers.num_inherited

    async def _ask(self, request: Request) -> bytes:
        _send(self._writer, REQUEST.dump_json(request))
        return await _receive(self._reader)


async def _of(answer: Any) -> None:
    try:
        await answer
    except RayError as error:
        log.warning("who could say whether turns still run is lost: %s", type(error).__name__)


def _end_supervisors(but: int) -> None:
    """None of this process's may wait for the lease that is to be given up. They cannot be asked: there is no GCS."""
    for process in psutil.Process().children(recursive=True):
        try:
            if process.pid != but and process.cmdline()[:1] and process.cmdline()[0].startswith(TITLE):
                process.kill()
        except psutil.Error:
            continue  # it has ended


def _send(writer: asyncio.StreamWriter, message: bytes) -> None:
    writer.write(len(message).to_bytes(SIZE_BYTES) + message)


async def _receive(reader: asyncio.StreamReader) -> bytes:
    """Raises EOFError: the other end is gone."""
    size = int.from_bytes(await reader.readexactly(SIZE_BYTES))
    return await reader.readexactly(size)
