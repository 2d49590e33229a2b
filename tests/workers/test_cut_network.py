"""Ranks on two hosts (network namespaces) whose link is cut: the whole group ends, within its leases."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from tests.hosts import ip, why_no_namespaces

LEASE_S, START_S, MARGIN_S = 2.0, 90.0, 6.0
HOSTS = ("10.213.77.1", "10.213.77.2")


@pytest.fixture
def spaces() -> Iterator[list[str]]:
    """Two namespaces with a link between them."""
    names = [f"holdfast-{os.getpid()}-{i}" for i in range(2)]
    if reason := why_no_namespaces():
        pytest.skip(reason)
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "veth0", "netns", names[0], "type", "veth", "peer", "name", "veth0", "netns", names[1])
        for name, host in zip(names, HOSTS, strict=True):
            ip("-n", name, "addr", "add", f"{host}/24", "dev", "veth0")
            for device in ("lo", "veth0"):
                ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@dataclass
class RankProcess:
    """A rank in a namespace, and the lines that it prints."""

    process: subprocess.Popen[str]
    lines: queue.SimpleQueue[str] = field(default_factory=queue.SimpleQueue)

    def __post_init__(self) -> None:
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @classmethod
    def start(cls, space: str, rank: int, store_port: int = 0) -> RankProcess:
        command = ["ip", "netns", "exec", space, sys.executable, "-m", "tests.workers.rank_process"]
        command += ["--rank", str(rank), "--host", HOSTS[rank], "--lease-s", str(LEASE_S)]
        command += ["--store-host", HOSTS[0], "--store-port", str(store_port)]
        return cls(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout:
            for line in self.process.stdout:
                self.lines.put(line.strip())

    def end(self) -> None:
        self.process.kill()
        self.process.wait(10)
        self._reader.join(10)

    def wait_for(self, beginning: str, timeout_s: float) -> str:
        deadline = time.monotonic() + timeout_s
        while True:
            line = self.lines.get(timeout=max(0.01, deadline - time.monotonic()))
            if line.startswith(beginning):
                return line.removeprefix(beginning).strip()


@pytest.mark.parametrize("cut", ["both ways", "to the leader only", "to the follower only"])
def test_ranks_that_cannot_reach_each_other_end_together(spaces: list[str], cut: str) -> None:
    ranks = [RankProcess.start(spaces[0], 0)]
    try:
        ranks.append(RankProcess.start(spaces[1], 1, int(ranks[0].wait_for("port:", START_S))))
        for rank in ranks:
            rank.wait_for("ready", START_S)
        if cut == "both ways":
            ip("-n", spaces[0], "link", "set", "veth0", "down")
        else:
            source = 1 if cut == "to the leader only" else 0
            ip("-n", spaces[source], "route", "add", "blackhole", f"{HOSTS[1 - source]}/32")
        reasons = [rank.wait_for("lost:", LEASE_S + MARGIN_S) for rank in ranks]
        assert all(reasons)
        assert [rank.process.wait(MARGIN_S) for rank in ranks] == [9, 9]
    finally:
        for rank in ranks:
            rank.end()
