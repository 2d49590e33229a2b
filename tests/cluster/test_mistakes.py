"""A new user's mistakes get one sentence that names the setting, and exit code 1."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from cluster.config import load_config
from holdfast.errors import ConfigError
from tests.cluster.served import HOLDFAST
from tests.ports import free_port

NOBODY = "http://127.0.0.1:9"
COMMANDS = (
    ["status"],
    ["sessions"],
    ["audit"],
    ["drain", "worker-0"],
    ["restart"],
    ["chaos", "--faults", "1"],
)


def run(*words: str, timeout_s: float = 120.0) -> tuple[int, str, str]:
    done = subprocess.run([*HOLDFAST, *words], capture_output=True, text=True, timeout=timeout_s)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.parametrize("url", [NOBODY, "no url"])
def test_a_dead_url_is_one_sentence(command: list[str], url: str) -> None:
    code, out, err = run(*command, "--url", url)
    assert code == 1 and not out
    assert err.startswith(f"holdfast: no router answers at {url}: ") and err.count("\n") == 1, err


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"routers": 2, "port": 8140, "grpc_port": 8141}, "HTTP ports 8140-8141 and gRPC ports 8141-8142 overlap"),
        ({"routers": 3, "port": 8142, "grpc_port": 8140}, "overlap"),
        ({"port": 8140, "grpc_port": 8140}, "overlap"),
        ({"routers": 4, "port": 65533, "grpc_port": 0}, "port 65536 is above 65535"),
        ({"model": "/nonexistent"}, "model: /nonexistent is not a checkpoint folder"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, settings)
    assert message in caught.value.message


@pytest.mark.parametrize("settings", [{"routers": 2, "port": 0, "grpc_port": 8140}, {"port": 8140, "grpc_port": 8141}])
def test_ports_that_do_not_overlap_are_accepted(settings: dict[str, object]) -> None:
    load_config(None, settings)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "/nonexistent"], "model: /nonexistent is not a checkpoint folder (it has no config.json)"),
        (["--journal-path", "/proc/no/journal.db"], "journal_path: cannot write /proc/no/journal.db"),
        (["--device", "cuda"], "device: cuda needs a GPU for each of 2 ranks; this machine has 0"),
        (["--address", "127.0.0.1:9"], "address: no Ray cluster answers at 127.0.0.1:9: "),
        (["--address", "nowhere"], "address: nowhere is not HOST:PORT"),
        (["--ray-log", "/proc/no/ray.log"], "ray_log: cannot write /proc/no/ray.log"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_serve_refuses_in_one_sentence(tmp_path: Path, flags: list[str], message: str) -> None:
    own = [] if "--journal-path" in flags else ["--journal-path", str(tmp_path / "j.db")]
    if "--journal-path" in flags:
        own = ["--ray-log", str(tmp_path / "ray.log")]
    ports = ["--port", str(free_port()), "--grpc-port", str(free_port())]
    began = time.monotonic()
    code, out, err = run("serve", *ports, *own, *flags)
    assert code == 1 and not out
    last = err.strip().splitlines()[-1]
    assert last.startswith("holdfast: ") and message in last, err
    assert "Traceback" not in err
    assert time.monotonic() - began < 100, "refused, not timed out"
