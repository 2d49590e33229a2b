"""``make demo``: three sessions stream, and the worker of one of them is killed.

The same turns run twice with the same seeds: once undisturbed, once with a ``kill -9`` in the middle of
a stream. The clients of the second run must see the same tokens as those of the first.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import ray
from rich.console import Console
from rich.table import Table

from cluster.config import Config
from cluster.ray_backend.cluster import Cluster
from cluster.ray_backend.connect import connect
from cluster.ray_backend.output import ray_output
from holdfast.v1 import session_pb2, session_pb2_grpc

QUESTIONS = {
    "ada": ["What does os.path.join do?", "Explain list.sort.", "And how do I use dict.get?"],
    "bob": ["Tell me about threading.Lock.", "What does str.split do?", "Explain that once more."],
    "eve": ["help(json.dumps)", "What does the with statement do?", "Tell me about generators."],
}
VICTIM, VICTIM_TURN, VICTIM_TOKENS = "ada", 1, 12
OUTPUT_TOKENS = 48
RESTART_DEADLINE_S = 60.0


@dataclass
class TurnLog:
    """What a client received of one turn. Times in seconds."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    first_token_s: float = 0.0
    longest_gap_s: float = 0.0


class Clients:
    """The clients of a running cluster."""

    def __init__(self, cluster: Cluster, console: Console) -> None:
        self._cluster = cluster
        self._console = console
        self._channel = grpc.aio.insecure_channel(cluster.grpc_url.removeprefix("grpc://"))
        self._stub = session_pb2_grpc.SessionServiceStub(self._channel)
        self.killed = ""

    async def play(self, label: str, *, kill: bool) -> dict[str, list[TurnLog]]:
        """Run all sessions concurrently; returns the turns of each."""
        names = list(QUESTIONS)
        logs = await asyncio.gather(*(self._session(name, f"{label}-{name}", kill) for name in names))
        return dict(zip(names, logs, strict=True))

    async def _session(self, name: str, session_id: str, kill: bool) -> list[TurnLog]:
        turns = []
        for number, question in enumerate(QUESTIONS[name]):
            log = TurnLog()
            victim = kill and name == VICTIM and number == VICTIM_TURN
            seed = number + 100 * list(QUESTIONS).index(name)
            request = session_pb2.GenerateRequest(
                session_id=session_id,
                text=f"<|user|>{question}<|end|><|assistant|>",
                sampling=session_pb2.Sampling(
                    temperature=0.7, top_k=40, seed=seed, max_tokens=OUTPUT_TOKENS, ignore_eos=True
                ),
            )
            last = started = time.monotonic()
            async for chunk in self._stub.Generate(request):
                now = time.monotonic()
                if not log.tokens:
                    log.first_token_s = now - started
                else:
                    log.longest_gap_s = max(log.longest_gap_s, now - last)
                last = now
                log.tokens += chunk.tokens
                log.text += chunk.text
                log.prompt_tokens, log.cached_tokens = chunk.prompt_tokens, chunk.cached_tokens
                if victim and not self.killed and len(log.tokens) >= VICTIM_TOKENS:
                    await self._kill_worker_of(session_id)
            turns.append(log)
        return turns

    async def _kill_worker_of(self, session_id: str) -> None:
        session = await self._stub.Get(session_pb2.GetRequest(session_id=session_id))
        for worker in await self.workers():
            if worker["worker_id"] == session.worker_id:
                self.killed = f"{session.worker_id} (pid {worker['pid']})"
                self._console.print(f"[bold red]kill -9 {self.killed}[/], in the middle of {session_id}'s stream")
                os.kill(int(worker["pid"]), signal.SIGKILL)

    async def workers(self) -> list[dict[str, Any]]:
        return await self._fetch("/holdfast/workers")

    async def audit(self) -> list[dict[str, Any]]:
        return await self._fetch("/holdfast/audit")

    async def _fetch(self, path: str) -> list[dict[str, Any]]:
        async with httpx.AsyncClient(timeout=20) as http:
            answer = await http.get(self._cluster.url + path)
            rows: list[dict[str, Any]] = answer.raise_for_status().json()
            return rows

    async def close(self) -> None:
        await self._channel.close()


async def demo(folder: Path) -> bool:
    """Run the demo; returns whether every check passed."""
    log = Path(tempfile.gettempdir()) / "holdfast-demo-ray.log"
    config = Config(port=0, grpc_port=0, workers=2, device="cpu", journal_path=folder / "journal.db", ray_log=log)
    with ray_output(config.ray_log_path) as stdout:
        return await _demo(Console(file=stdout), config)


async def _demo(console: Console, config: Config) -> bool:
    began = time.monotonic()
    connect(config)
    cluster = Cluster(config)
    try:
        await cluster.start()
        console.print(f"cluster is up in {time.monotonic() - began:.1f} s: {cluster.url} {cluster.grpc_url}")
        console.print(f"Ray's messages: {config.ray_log_path}")
        clients = Clients(cluster, console)
        console.print("first run, undisturbed ...")
        expected = await clients.play("calm", kill=False)
        console.print("second run, with a kill -9 ...")
        seen = await clients.play("storm", kill=True)
        console.print("waiting for the killed worker's next incarnation ...")
        deadline = time.monotonic() + RESTART_DEADLINE_S
        while len(await clients.workers()) < config.workers and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        audits = await clients.audit()
        await clients.close()
    finally:
        await cluster.stop()
        ray.shutdown()
    return report(console, expected, seen, audits, clients.killed, config.workers)


def report(
    console: Console,
    expected: dict[str, list[TurnLog]],
    seen: dict[str, list[TurnLog]],
    audits: list[dict[str, str]],
    killed: str,
    num_workers: int,
) -> bool:
    """Print the summary; returns whether every check passed."""
    table = Table(title="What the clients received")
    for column in ("session", "turn", "prompt", "cached", "output", "first token", "longest gap", "same tokens"):
        table.add_column(column, justify="left" if column == "session" else "right")
    same = True
    for name, turns in seen.items():
        for number, turn in enumerate(turns):
            equal = turn.tokens == expected[name][number].tokens and len(turn.tokens) == OUTPUT_TOKENS
            same &= equal
            table.add_row(
                name,
                str(number + 1),
                str(turn.prompt_tokens),
                str(turn.cached_tokens),
                str(len(turn.tokens)),
                f"{1000 * turn.first_token_s:.0f} ms",
                f"{1000 * turn.longest_gap_s:.0f} ms",
                "yes" if equal else "NO",
            )
    console.print(table)
    console.print("the interrupted answer:", repr(seen[VICTIM][VICTIM_TURN].text), markup=False)
    clean = len(audits) == num_workers and all(report["ok"] for report in audits)
    pause_s = seen[VICTIM][VICTIM_TURN].longest_gap_s
    checks = Table(title="Checks", show_header=False)
    checks.add_row("a worker was killed mid-stream", killed or "NO")
    checks.add_row("pause that its client saw", f"{1000 * pause_s:.0f} ms")
    checks.add_row("every token as in the undisturbed run", "yes" if same else "NO")
    checks.add_row(f"audit of {len(audits)} live workers of {num_workers}", "no page leaked" if clean else "FAILED")
    console.print(checks)
    return bool(killed) and same and clean


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="holdfast-demo-") as folder:
        passed = asyncio.run(demo(Path(folder)))
    Console().print("[bold green]all checks passed[/]" if passed else "[bold red]a check failed[/]")
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
