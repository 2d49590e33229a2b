"""The Ray nodes that workers run on, each a host of its own where this machine makes network namespaces."""

from __future__ import annotations

import asyncio
from asyncio.subprocess import STDOUT, Process
from contextlib import suppress
from pathlib import Path

import psutil

from tests.cluster.served import HOLDFAST
from tests.hosts import Host

RANKS_A_NODE = 2


class Node:
    """A Ray node that a worker of ours runs on. ``folder``: Ray's files of it, and its log."""

    def __init__(self, host: Host | None, folder: Path) -> None:
        self.host = host
        # Nodes that share a folder may choose the same names for their sockets: only one of them starts then.
        self._options = ["--num-cpus", str(RANKS_A_NODE), "--temp-dir", str(folder)]
        self._log = folder / "node.log"
        self._process: Process | None = None
        folder.mkdir()

    async def keep(self, address: str) -> None:
        """Run it, and again whenever it ends, as a service manager would."""
        command = [*HOLDFAST, "join", address, *self._options]
        if self.host is not None:
            command = self.host.command(*command, "--node-ip-address", self.host.address)
        try:
            with self._log.open("ab") as log:
                while True:
                    self._process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=STDOUT)
                    await self._process.wait()
        finally:
            self.kill()

    def kill(self) -> None:
        """As when a machine loses power: every process of it, at once."""
        with suppress(psutil.NoSuchProcess):
            if self._process is not None:
                me = psutil.Process(self._process.pid)
                for process in [*me.children(recursive=True), me]:
                    process.kill()
