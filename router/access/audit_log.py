"""What operators did, and who changed keys: a file of JSON lines that only grows."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from holdfast.errors import ConfigError


class AuditLog:
    """Several processes may write to one file: each line is one write. Raises ConfigError if it cannot be opened."""

    def __init__(self, path: Path | None) -> None:
        self._file: int | None = None
        if path is not None:
            try:
                self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            except OSError as error:
                raise ConfigError(f"audit_log: cannot write {path}: {error.strerror}") from None

    def write(self, action: str, **what: str | int | None) -> None:
        """Add a line."""
        if self._file is not None:
            line = json.dumps({"time": round(time.time(), 3), "action": action} | what)
            os.write(self._file, f"{line}\n".encode())

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
