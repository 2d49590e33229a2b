"""The documents do what they say: their code blocks run, their links lead somewhere.

A shell or Python block runs as it is, but for the addresses, against one cluster that all blocks share. Lines
that start a server are checked, not run: their flags must be accepted. A block marked ``no-test`` needs what
one machine has not.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from cluster.cli.main import cli
from cluster.config import load_config
from tests.cluster.served import Served, serving
from workers.config import BUNDLED_MODEL

ROOT = Path(__file__).parent.parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
SERVERS = ("holdfast serve", "make serve", "make demo", "make test", "make check")
TIMEOUT_S = 300
MAX_README_LINES = 150


@dataclass(frozen=True)
class Block:
    document: str
    number: int
    language: str
    info: str
    text: str

    def __str__(self) -> str:
        return f"{self.document}-{self.number}-{self.language}"


def blocks() -> list[Block]:
    found = []
    for path in DOCUMENTS:
        for number, match in enumerate(BLOCK.finditer(path.read_text())):
            found.append(Block(path.name, number, match[1], match[2].strip(), match[3]))
    return found


BLOCKS = blocks()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("docs")) as cluster:
        yield cluster


def commands(text: str) -> list[str]:
    """The block's commands, without comments, with continued lines joined."""
    joined = text.replace("\\\n", " ")
    return [line for line in joined.splitlines() if line.strip() and not line.strip().startswith("#")]


def check_server(command: str) -> None:
    """A command that would start a server: the flags, or the target of make, must be there."""
    words = shlex.split(command, comments=True)
    if words[0] == "make":
        subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, check=True, capture_output=True)
        return
    context = cli.commands["serve"].make_context("serve", words[2:])
    given = {key: value for key, value in context.params.items() if value not in (None, ())}
    given.pop("detach")  # of the command, not of the configuration
    given.pop("config_file", None)
    load_config(None, given | {"model": BUNDLED_MODEL})


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "sh"], ids=str)
def test_shell_blocks_run(block: Block, served: Served, tmp_path: Path) -> None:
    if block.info == "no-test":
        for command in commands(block.text):
            if command.startswith(SERVERS):
                check_server(command)
        return
    run = []
    for command in commands(block.text):
        if command.startswith(SERVERS):
            check_server(command)
        else:
            run.append(command)
    script = "\n".join(["set -euo pipefail", *run])
    script = script.replace("make -n", f"make -C {ROOT} -n").replace(".venv/bin/holdfast", "holdfast")
    done = subprocess.run(
        ["bash", "-c", at(script, served)],
        cwd=tmp_path,
        env=environment(served),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert '"error"' not in done.stdout, done.stdout


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "python"], ids=str)
def test_python_blocks_run(block: Block, served: Served, tmp_path: Path) -> None:
    command = [sys.executable, "-c", at(block.text, served)]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(served), capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0 and done.stdout.strip(), done.stderr


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "yaml"], ids=str)
def test_yaml_blocks_are_configurations(block: Block, tmp_path: Path) -> None:
    config = yaml.safe_load(block.text) | {"model": str(BUNDLED_MODEL)}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    load_config(file, {})


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files(path: Path) -> None:
    text = path.read_text()
    headings = {
        re.sub(r"[^\w -]", "", line.lstrip("# ").lower()).replace(" ", "-")
        for line in text.splitlines()
        if line.startswith("#")
    }
    for target in LINK.findall(text):
        if target.startswith("#"):
            assert target[1:] in headings, target
        elif not target.startswith("https://"):
            assert (path.parent / target.partition("#")[0]).exists(), target


def test_every_kind_of_block_is_known() -> None:
    assert {block.language for block in BLOCKS} <= {"sh", "python", "yaml", "mermaid", "ini"}


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= MAX_README_LINES


def at(text: str, served: Served) -> str:
    """The block, talking to the shared cluster."""
    return text.replace("http://127.0.0.1:8000", served.url).replace("127.0.0.1:50051", served.router()["grpc"])


def environment(served: Served) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return os.environ | {"PATH": path, "HOLDFAST_URL": served.url}
