"""Where Ray's messages go. Imports no ``ray``, which reads the environment when it is imported."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from holdfast.errors import ConfigError


@contextlib.contextmanager
def ray_output(path: Path) -> Iterator[TextIO]:
    """Send what Ray prints on stdout to a file; yields the real stdout.

    Ray prints a paragraph there for each process that dies. Holdfast logs such deaths itself, on stderr.
    Raises ConfigError.
    """
    stdout = sys.stdout
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a", buffering=1)
    except OSError as error:
        raise ConfigError(f"ray_log: cannot write {path}: {error.strerror}") from None
    with file, contextlib.redirect_stdout(file):
        yield stdout
