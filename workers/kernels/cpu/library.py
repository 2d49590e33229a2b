"""The compiled kernels: built at their first use for the CPU that is there, and kept in a cache."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
import time
from functools import cache
from pathlib import Path

from workers.kernels.cpu.ops import OPS

log = logging.getLogger(__name__)

SOURCE = Path(__file__).parent / "kernels.cpp"
COMPILERS = ("c++", "g++", "clang++")
FLAGS = (
    "-std=c++20", "-O3", "-march=native", "-fPIC", "-shared", "-pthread",
    # How a vector is passed is of no matter within one file.
    "-Wno-psabi",
)  # fmt: skip
TIMEOUT_S = 300


def cache_dir() -> Path:
    """``HOLDFAST_CACHE``, else this user's cache folder."""
    if path := os.environ.get("HOLDFAST_CACHE"):
        return Path(path)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "holdfast"


@cache
def load_library() -> ctypes.CDLL | None:
    """The kernels; None, with one line in the log, if they cannot be compiled here.

    They were compiled for this source, compiler and CPU, by this process or an earlier one.
    """
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        log.warning("no C++ compiler (%s): a CPU's layers run in torch, several times slower", ", ".join(COMPILERS))
        return None
    try:
        return _opened(_compiled(compiler))
    except (OSError, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", "") or ""
        log.warning("%s did not compile the CPU's kernels; its layers run in torch: %s %s", compiler, error, output)
        return None


def _compiled(compiler: str) -> Path:
    path = cache_dir() / f"kernels-{_key(compiler)}.so"
    if path.exists():
        return path
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (path.parent / "lock").open("w") as lock, tempfile.TemporaryDirectory(dir=path.parent) as folder:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the ranks of a machine start together: one compiles
        if path.exists():
            return path
        start, built = time.monotonic(), Path(folder) / path.name
        command = [compiler, *FLAGS, str(SOURCE), "-o", str(built)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S)
        built.replace(path)
    log.info("compiled the CPU's kernels in %.1f s: %s", time.monotonic() - start, path)
    return path


def _key(compiler: str) -> str:
    """Of what the result depends on: the source, the compiler, the CPU."""
    digest = hashlib.sha256()
    for source in [*sorted(SOURCE.parent.glob("*.h")), SOURCE]:
        digest.update(source.read_bytes())
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, timeout=TIMEOUT_S)
    digest.update(version.stdout + " ".join(FLAGS).encode() + _cpu().encode())
    return digest.hexdigest()[:16]


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return os.uname().machine
    return os.uname().machine + next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _opened(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    pointer, size, kind = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    signatures = {
        "holdfast_op_size": (size, [size]),
        "holdfast_open": (pointer, [size]),
        "holdfast_close": (None, [pointer]),
        "holdfast_panel_bytes": (size, [size, size, kind]),
        "holdfast_pack": (None, [pointer, size, size, kind, pointer]),
        "holdfast_choose": (None, [pointer, pointer, pointer, size, size, pointer, pointer]),
        "holdfast_mask": (None, [pointer, pointer, size, pointer, size, size, pointer]),
        "holdfast_run": (
            None,
            [pointer, kind, pointer, size, pointer, size, pointer, pointer, pointer, size, pointer, size],
        ),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    sizes = [library.holdfast_op_size(code) for code in range(len(OPS) + 1)]
    expected = [ctypes.sizeof(op) for op in OPS] + [0]
    assert sizes == expected, f"ops.py and ops.h differ: {sizes} and {expected}"
    return library
