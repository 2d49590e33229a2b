"""DESIGN section 3: imports point down, and the core is pure."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
STANDARD = set(sys.stdlib_module_names)
IMPURE = {"asyncio", "datetime", "os", "random", "secrets", "socket", "subprocess", "threading", "time", "uuid"}
RAY_FILES = {"workers/actor.py", "router/actor.py"}


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""


def files(folder: str) -> list[Path]:
    found = [p for p in (ROOT / folder).rglob("*.py") if "_pb2" not in p.name]
    assert found, folder
    return found


def test_core_is_pure() -> None:
    allowed = {"workers/kv": ("workers.kv", "holdfast.errors"), "workers/scheduling": ("workers.", "holdfast.errors")}
    for folder, ours in allowed.items():
        for path in files(folder):
            for name in imports(path):
                top = name.split(".")[0]
                pure = (top in STANDARD and top not in IMPURE) or top == "numpy" or name.startswith(ours)
                assert pure, f"{path}: {name}"


def test_scheduling_imports_only_the_kv_core() -> None:
    for path in files("workers/scheduling"):
        for name in imports(path):
            if name.startswith("workers"):
                assert name.startswith(("workers.kv", "workers.scheduling")), f"{path}: {name}"


def test_layers_point_down() -> None:
    above = {
        "proto": ("workers", "router", "cluster"),
        "workers": ("router", "cluster"),
        "router": ("workers", "cluster"),
    }
    for folder, forbidden in above.items():
        for path in files(folder):
            for name in imports(path):
                assert name.split(".")[0] not in forbidden, f"{path} imports {name}"


def test_ray_stays_at_the_edges() -> None:
    for folder in ("workers", "router", "proto"):
        for path in files(folder):
            if str(path.relative_to(ROOT)) not in RAY_FILES:
                assert not any(name.split(".")[0] == "ray" for name in imports(path)), path
    # The simulator runs it too; what it starts is the places' affair.
    assert not any(name.split(".")[0] in ("ray", "grpc") for name in imports(ROOT / "cluster/supervisor.py"))


def test_models_and_engine_need_no_grpc() -> None:
    for path in [
        *files("workers/models"),
        *files("workers/kernels"),
        ROOT / "workers/rank.py",
        ROOT / "workers/leader.py",
    ]:
        assert not any(name.split(".")[0] in ("grpc", "ray") for name in imports(path)), path
