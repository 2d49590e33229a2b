"""Lifelines of real processes: they end with them, and cost them nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from holdfast.lifeline import one_ended, open_lifeline

PROCESS = """
import asyncio, os, signal
from holdfast.lifeline import open_lifeline
kept, told = os.pipe()

async def serve():
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: print("heard", flush=True))
    print(open_lifeline("127.0.0.1"), flush=True)
    os.close(told)
    print(await asyncio.to_thread(os.read, kept, 1), flush=True)
    await asyncio.sleep(60)

asyncio.run(serve())
"""


@contextmanager
def process() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process and its lifeline."""
    with subprocess.Popen([sys.executable, "-c", PROCESS], stdout=subprocess.PIPE, text=True) as made:
        assert made.stdout is not None
        try:
            yield made, made.stdout.readline().strip()
        finally:
            made.kill()


async def test_a_lifeline_ends_when_its_process_is_killed_and_not_before() -> None:
    with process() as (killed, lifeline), process() as (_, other):
        for end in ([], [signal.SIGSTOP, signal.SIGCONT]):
            for number in end:
                killed.send_signal(number)
            watching = asyncio.create_task(one_ended([other, lifeline]))
            assert (await asyncio.wait((watching,), timeout=0.3))[1], "it lives"
            watching.cancel()
        watching = asyncio.create_task(one_ended([other, lifeline]))
        await asyncio.sleep(0.1)
        killed.kill()
        await asyncio.wait_for(watching, 20)
        watching = asyncio.create_task(one_ended([lifeline]))
        assert (await asyncio.wait((watching,), timeout=0.3))[1], "what cannot be reached says nothing"
        watching.cancel()


def test_it_holds_no_file_and_takes_no_signal() -> None:
    with process() as (held, _):
        assert held.stdout is not None
        assert held.stdout.readline() == "b''\n", "the pipe that the process closed is closed"
        for _ in range(20):
            held.send_signal(signal.SIGTERM)
            assert held.stdout.readline() == "heard\n"


async def test_a_connection_that_something_between_has_cut_is_made_again() -> None:
    accepted: list[asyncio.StreamWriter] = []
    between = await asyncio.start_server(lambda reader, writer: accepted.append(writer), "127.0.0.1", 0)
    watching = asyncio.create_task(one_ended([f"127.0.0.1:{between.sockets[0].getsockname()[1]}"]))
    for number in range(1, 4):
        async with asyncio.timeout(20):
            while len(accepted) < number:
                await asyncio.sleep(0.01)
        accepted[-1].close()
    assert not watching.done()
    between.close()
    accepted[-1].close()
    await asyncio.wait_for(watching, 20)


def test_a_system_that_does_not_allow_it_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoUnshare:
        def __init__(self, name: None) -> None: ...

        def unshare(self, flags: int) -> int:
            return -1

    monkeypatch.setattr("holdfast.lifeline.ctypes.CDLL", NoUnshare)
    files = os.listdir("/proc/self/fd")
    assert open_lifeline("127.0.0.1") == ""
    assert os.listdir("/proc/self/fd") == files, "they are all there yet"
