"""What a step costs the host, by part, with a model that computes nothing; and how much of it a device hides.

The leader is one of a group of two ranks, whose other acks at once: the step log is written and serialized. Steps are
launched as on a GPU, on this machine's CPU: a decode is a graph, to which the host says what its batch is; without
graphs, a batch's tensors and the plans of the Triton kernels are made at each step. The stand-in device takes 5 ms a
step, asynchronously: what is launched returns at once, and results wait for their time.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch

from benchmarks.common import long_context_model, save
from benchmarks.ranks import Timers
from holdfast.v1 import rank_pb2
from workers.config import EngineConfig
from workers.engine import rank as rank_module
from workers.engine.decode_graphs import DecodeGraphs
from workers.engine.leader import Leader
from workers.engine.messages import Submission
from workers.engine.stream import Stream
from workers.kernels.attention_launch import plan_triton_attention, plan_triton_decodes
from workers.models import Hidden
from workers.models.parallel import Shard
from workers.scheduling import SamplingParams

T = TypeVar("T")
BATCHES = (1, 16, 64, 256)
HISTORIES = (128, 8192)
"""Tokens of each turn's history, at the same batch."""
STEPS, WARM_UP, ROUNDS = 120, 20, 5
DEVICE_S = 0.005


replaced: Callable[[Any, str, Any], None] = setattr
"""Replaces a name of a module, in this process alone."""


class NullDevice:
    """Computes nothing. With ``step_s``, its results are there that long after it began."""

    def __init__(self, leader: Leader, step_s: float) -> None:
        self.step_s, self.free_at = step_s, 0.0
        logits = torch.zeros(1, 8)  # of which the likeliest is found at once

        def compute(batch: Any, kv: Any, taps: Any = ()) -> Hidden:
            self._begin()
            rows = logits.repeat(len(batch.logit_rows), 1)
            return Hidden(rows, rows, [])

        decoder: Any = leader.rank.decoder
        decoder.hidden, decoder.logits = compute, lambda hidden: hidden
        leader.rank._model._plan_attention = plan_triton_attention
        leader.rank.stream, leader.rank.overlaps = Stream(), True

    def _begin(self) -> None:
        self.free_at = max(self.free_at, time.perf_counter()) + self.step_s

    def capture(self, run: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """As ``decode_graphs.Capture``: a replay is a step."""
        return run(), self._begin

    def download(self, tensor: torch.Tensor) -> Any:
        ready_at = self.free_at

        def wait() -> torch.Tensor:
            if self.step_s:
                time.sleep(max(0.0, ready_at - time.perf_counter()))
            return tensor

        return SimpleNamespace(wait=wait)


def run(
    model: Path, batch: int, history: int, step_s: float = 0.0, *, apart: int = 0, graphs: bool = True
) -> dict[str, float]:
    """Microseconds of a step by part, the median; ``between steps`` is all that passes from one to the next.

    ``apart``: tokens that each turn's history is longer than the one's before.
    """
    config = EngineConfig(
        model=model,
        max_total_tokens=batch * (history + apart * batch + STEPS + 64) + 1024,
        max_running_requests=batch,
        max_sessions=batch + 1,
        chunked_prefill_size=8192,
        num_threads=1,
        attention_backend="torch_native",  # its tensors are made as for a GPU
    )
    group: Any = SimpleNamespace(shard=Shard(0, 2), minimum=lambda value, device: value, broadcast=lambda x: x)

    def send(entry: rank_pb2.Entry) -> None:
        entry.SerializeToString()
        leader.log.ack(1, rank_pb2.Ack(index=entry.index, digest=entry.digest))

    def fail(error: BaseException) -> None:
        raise error

    leader = Leader(config, lambda updates: None, fail, group=group, send=send)
    gc.collect()
    gc.freeze()  # as a rank does when it has started
    device = NullDevice(leader, 0.0)
    replaced(rank_module, "Download", device.download)
    rank = leader.rank
    if graphs:
        rank._model._graphs = DecodeGraphs(
            rank.decoder,
            rank.kv,
            rank.tables,
            plan_triton_decodes,
            device.capture,
            max_batch=batch,
            context_len=rank.context_len,
        )
    params = SamplingParams(max_tokens=STEPS + WARM_UP + 40, ignore_eos=True)
    for i in range(batch):
        tokens = array("i", ((i * 131 + j * 17) % 2000 for j in range(history + apart * i)))
        leader._admit(Submission(f"t{i}", f"s{i}", "", 1, tokens, len(tokens), params), None)
    turns = list(leader.scheduler.turns.values())
    while not all(turn.num_output for turn in turns):
        leader.step()
    device.step_s = step_s
    for _ in range(WARM_UP):
        leader.step()
    timers, gaps = Timers(), []
    for owner, method, part in (
        (leader.scheduler, "plan", "plan"),
        (leader._replication, "write", "log"),
        (leader.rank, "launch", "launch"),
        (leader, "collect", "collect"),
        (leader.scheduler, "commit", "commit"),
        (leader.rank, "choose", "choose"),
        (leader, "step", "step"),
    ):
        timers.around(owner, method, part)
    last = time.perf_counter()
    for _ in range(STEPS):
        leader.step()
        now = time.perf_counter()
        gaps.append(now - last)
        last = now
    assert len(leader.scheduler.running) == batch, "all turns decode"
    leader.rank.stream.close()
    return timers.p50_us() | {"between steps": round(1e6 * statistics.fmean(gaps), 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, nargs="*", default=BATCHES)
    arguments = parser.parse_args()
    figures: dict[str, Any] = {}
    with long_context_model(16_384) as model, torch.inference_mode():
        for name, graphs in (("us of a step, p50", True), ("without graphs", False)):
            figures[name] = {
                f"batch {batch}": run(model, batch, HISTORIES[0], graphs=graphs) for batch in arguments.batches
            }
        ratios = []
        for _ in range(ROUNDS):
            # Apart, since a step in which all of them need a page is not like the others.
            short, long = (run(model, 16, history, apart=1)["step"] for history in HISTORIES)
            ratios.append(long / short)
        figures["batch 16, 8192 tokens of history over 128"] = round(statistics.median(ratios), 3)
        host = run(model, 64, HISTORIES[0])["between steps"]
        beside = run(model, 64, HISTORIES[0], DEVICE_S)["between steps"]
    figures["batch 64, a device of 5 ms a step"] = {
        "us of the host alone": host,
        "us a step": beside,
        "host time hidden, %": round(100 * (1 - (beside - 1e6 * DEVICE_S) / host), 1),
    }
    save("step", figures)


if __name__ == "__main__":
    main()
