"""Several hosts on this machine: network namespaces on a bridge, whose links can be cut."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

NETNS = Path("/etc/netns")
"""Where ``ip netns exec`` finds a namespace's own files of /etc."""


def ip(*words: str) -> None:
    """The ``ip`` command. Raises CalledProcessError."""
    subprocess.run(["ip", *words], check=True, capture_output=True)


def why_no_namespaces() -> str:
    """Why this machine makes no network namespaces; empty: it does."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "needs root and iproute2, to make network namespaces"
    probe = f"holdfast-{os.getpid()}-probe"
    try:
        ip("netns", "add", probe)
        ip("link", "add", "veth0", "netns", probe, "type", "bridge")
    except subprocess.CalledProcessError as error:
        return f"this machine makes no network namespaces: {error.stderr.decode().strip()}"
    finally:
        subprocess.run(["ip", "netns", "del", probe], check=False, capture_output=True)
    return ""


@dataclass(frozen=True, slots=True)
class Host:
    """One namespace. ``link``: this machine's end of its cable."""

    space: str
    address: str
    link: str

    def command(self, *words: str) -> list[str]:
        """``words``, to be run there."""
        return ["ip", "netns", "exec", self.space, *words]

    def cut(self) -> None:
        """Nothing gets to it or from it."""
        ip("link", "set", self.link, "down")

    def heal(self) -> None:
        ip("link", "set", self.link, "up")


@contextmanager
def hosts(count: int) -> Iterator[tuple[str, list[Host]]]:
    """This machine's address on the bridge, and ``count`` hosts beside it."""
    # A net for each process: two test processes may have hosts at the same time.
    bridge, net = f"hf{os.getpid()}", f"10.213.{os.getpid() % 251}"
    made = [Host(f"holdfast-{os.getpid()}-{i}", f"{net}.{10 + i}", f"hf{os.getpid()}-{i}") for i in range(count)]
    try:
        ip("link", "add", bridge, "type", "bridge")
        ip("addr", "add", f"{net}.1/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        for host in made:
            # No name server can be reached from there: to ask one would take its timeout, each time.
            (NETNS / host.space).mkdir(parents=True)
            (NETNS / host.space / "resolv.conf").write_text("nameserver 127.0.0.1\n")
            ip("netns", "add", host.space)
            ip("link", "add", host.link, "type", "veth", "peer", "name", "veth0", "netns", host.space)
            ip("link", "set", host.link, "master", bridge, "up")
            ip("-n", host.space, "addr", "add", f"{host.address}/24", "dev", "veth0")
            for device in ("lo", "veth0"):
                ip("-n", host.space, "link", "set", device, "up")
            ip("-n", host.space, "route", "add", "default", "via", f"{net}.1")
        yield f"{net}.1", made
    finally:
        for host in made:
            # The kernel takes a namespace's cables along, but some time after: the names are free now.
            for words in (["link", "del", host.link], ["netns", "del", host.space]):
                subprocess.run(["ip", *words], check=False, capture_output=True)
            shutil.rmtree(NETNS / host.space, ignore_errors=True)
        subprocess.run(["ip", "link", "del", bridge], check=False, capture_output=True)
