"""The listeners of Ray's client wait while there is no GCS.

Two threads of a client print what the GCS passes on: other processes' output, and errors. While there is no GCS, their
calls return nothing at once and are repeated at once (Ray 2.60, ``print_logs`` and ``listen_error_messages``): together
they take a core, on a machine that ranks and routers may share.
"""

from __future__ import annotations

import time
from typing import Any

from ray import _raylet as untyped

PAUSE_S = 0.1
_raylet: Any = untyped


class _Logs(_raylet.GcsLogSubscriber):  # type: ignore[misc]  # Ray has no types here
    def poll(self, timeout: float | None = None) -> dict[str, Any] | None:
        batch: dict[str, Any] | None = super().poll(timeout)
        if batch is None or not batch["lines"]:
            time.sleep(PAUSE_S)
        return batch


class _Errors(_raylet.GcsErrorSubscriber):  # type: ignore[misc]  # Ray has no types here
    def poll(self, timeout: float | None = None) -> tuple[bytes | None, dict[str, Any] | None]:
        key, error = super().poll(timeout)
        if error is None:
            time.sleep(PAUSE_S)
        return key, error


def install() -> None:
    """Call before ``ray.init``, which makes the listeners."""
    _raylet.GcsLogSubscriber, _raylet.GcsErrorSubscriber = _Logs, _Errors
