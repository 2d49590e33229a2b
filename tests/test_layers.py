"""DESIGN section 3: imports point down, the core is pure, and no two modules import each other."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
STANDARD = set(sys.stdlib_module_names)
IMPURE = {"asyncio", "datetime", "os", "random", "secrets", "socket", "subprocess", "threading", "time", "uuid"}
RAY_FILES = {"workers/serving/actor.py", "router/actor.py"}
MAX_LINES = 400
LAYERS = {
    # Each room, with the rooms of its part that it may import. Rooms not named here are below all others.
    "workers/models": {"workers/models", "workers/kernels"},
    "workers/kernels": {"workers/kernels"},
    "workers/kv": {"workers/kv"},
    "workers/scheduling": {"workers/scheduling", "workers/kv"},
    "workers/store": {"workers/store"},
    "workers/grammar": {"workers/grammar", "workers/scheduling"},
    "workers/engine": {
        "workers/engine",
        "workers/models",
        "workers/kernels",
        "workers/scheduling",
        "workers/kv",
        "workers/grammar",
    },
    "router/journal": {"router/journal"},
    "router/fleet": {"router/fleet", "router/journal"},
    "router/access": {"router/access"},
    "router/turns": {"router/turns", "router/fleet", "router/journal", "router/access"},
    "router/formats": {"router/formats"},
    "router/batches": {"router/batches", "router/journal"},
    "router/faces": {
        "router/faces",
        "router/batches",
        "router/formats",
        "router/access",
        "router/turns",
        "router/fleet",
        "router/journal",
    },
    "cluster/ray_backend": {"cluster/ray_backend"},
    "cluster/chaos": {"cluster/chaos"},
    "cluster/bench": {"cluster/bench"},
}


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, inside functions and ``if TYPE_CHECKING`` too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""
            # A name may be a module of the package.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def files(folder: str) -> list[Path]:
    found = [p for p in (ROOT / folder).rglob("*.py") if "_pb2" not in p.name]
    assert found, folder
    return found


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == "proto" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def all_files() -> list[Path]:
    folders = ("proto", "workers", "router", "cluster", "benchmarks", "scripts", "tests")
    return [path for folder in folders for path in files(folder)]


def test_core_is_pure() -> None:
    pure_proto = ("holdfast.errors", "holdfast.names")
    allowed = {"workers/kv": ("workers.kv", *pure_proto), "workers/scheduling": ("workers.", *pure_proto)}
    for folder, ours in allowed.items():
        for path in files(folder):
            for name in imports(path):
                top = name.split(".")[0]
                pure = (top in STANDARD and top not in IMPURE) or top == "numpy" or name.startswith(ours)
                assert pure, f"{path}: {name}"


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


def test_rooms_import_only_rooms_below_them() -> None:
    rooms = {
        path.parent.relative_to(ROOT).as_posix() for part in ("workers", "router", "cluster") for path in files(part)
    }
    for room, below in LAYERS.items():
        part = room.split("/")[0]
        others = {
            other for other in rooms if other.count("/") >= 1 and other.startswith(part) and not other.startswith(room)
        }
        for path in files(room):
            for name in imports(path):
                for other in others:
                    if name.startswith(other.replace("/", ".") + "."):
                        top = "/".join(other.split("/")[:2])
                        assert top in below, f"{path.relative_to(ROOT)} imports {name}"


def test_no_two_modules_import_each_other() -> None:
    paths = {module_of(path): path for path in all_files()}
    graph = {
        # A package's own __init__ is where its modules are gathered: what it imports may not import it back.
        module: {name for name in imports(path) if name in paths and name != module}
        for module, path in paths.items()
    }
    done: set[str] = set()
    way: list[str] = []

    def visit(module: str) -> None:
        if module in way:
            raise AssertionError("a circle of imports: " + " -> ".join([*way[way.index(module) :], module]))
        if module in done:
            return
        way.append(module)
        for name in sorted(graph[module]):
            visit(name)
        way.pop()
        done.add(module)

    for module in sorted(graph):
        visit(module)


def test_files_are_short() -> None:
    long = {
        path.relative_to(ROOT).as_posix(): lines
        for path in all_files()
        if (lines := len(path.read_text().splitlines())) > MAX_LINES
    }
    assert not long


def test_nothing_is_unpickled() -> None:
    """What a file or a peer sends is data, never code."""
    forbidden = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
    for folder in ("proto", "workers", "router", "cluster"):
        for path in files(folder):
            found = {name.split(".")[0] for name in imports(path)} & forbidden
            assert not found, f"{path} imports {found}"
            calls = {
                ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
            }
            assert not calls & {"torch.load", "yaml.load", "eval", "exec"}, path


def test_ray_stays_at_the_edges() -> None:
    for folder in ("workers", "router", "proto"):
        for path in files(folder):
            if str(path.relative_to(ROOT)) not in RAY_FILES:
                assert not any(name.split(".")[0] == "ray" for name in imports(path)), path
    # The simulator runs the supervisor: its components bring Ray and gRPC.
    assert not any(name.split(".")[0] in ("ray", "grpc") for name in imports(ROOT / "cluster/supervisor.py"))


def test_models_and_engine_need_no_grpc() -> None:
    for folder in ("workers/models", "workers/kernels", "workers/engine"):
        for path in files(folder):
            assert not any(name.split(".")[0] in ("grpc", "ray") for name in imports(path)), path
