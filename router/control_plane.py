"""Whether the cluster's control plane (Ray's GCS) answers. Turns do not need it: the router says so, and goes on."""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

log = logging.getLogger("holdfast.router")
CHECK_EVERY_S = 1.0
TIMEOUT_S = 2.0
SILENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
"""Whatever else is answered, somebody answered."""


class ControlPlane:
    """``address``: of the GCS; empty: there is none to watch."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.unreachable_since: datetime | None = None
        self._task = asyncio.create_task(self._watch()) if address else None

    @property
    def degraded(self) -> str:
        """What is wrong; empty: nothing."""
        since = self.unreachable_since
        return f"control plane unreachable since {since.isoformat(timespec='seconds')}" if since is not None else ""

    async def _watch(self) -> None:
        async with grpc.aio.insecure_channel(self.address) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            while True:
                answers = await _answers(check)
                if answers and self.unreachable_since is not None:
                    log.warning("the control plane answers again")
                    self.unreachable_since = None
                elif not answers and self.unreachable_since is None:
                    self.unreachable_since = datetime.now(UTC)
                    log.warning("degraded: %s; turns go on, nothing that dies is started again", self.degraded)
                await asyncio.sleep(CHECK_EVERY_S)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


async def _answers(check: grpc.aio.UnaryUnaryMultiCallable) -> bool:
    try:
        await check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        return error.code() not in SILENT
    return True
