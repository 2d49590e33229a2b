"""``holdfast chat`` against a router."""

from __future__ import annotations

import asyncio

from click.testing import CliRunner

from cluster.cli.main import cli
from tests.harness import Harness


async def talk(cluster: Harness, *lines: str, options: tuple[str, ...] = ()) -> str:
    asked = ["chat", "--url", cluster.url, "--temperature", "0", "--max-tokens", "8", *options]
    result = await asyncio.to_thread(CliRunner().invoke, cli, asked, input="\n".join(lines) + "\n")
    assert result.exit_code == 0, result.output
    return result.output


async def sessions(cluster: Harness) -> list[str]:
    return sorted(record.session_id for record, _, _ in await cluster.router.core.journal.list_sessions(""))


async def test_turns_rewind_and_stats(cluster: Harness) -> None:
    said = await talk(cluster, "What does list.sort do?", "/stats", "And sorted?", "/stats", "/rewind", "And sorted?")
    first, second = (line for line in said.splitlines() if " tokens in (" in line)
    assert "(0 cached), 8 out" in first and "(0 cached)" not in second
    answers = said.split("> ")
    assert answers[3].strip() == answers[6].strip() != "", "the same turn after a rewind has the same answer"
    assert "1 turns are left" in said and await sessions(cluster) == []


async def test_a_named_session_stays_and_a_fork_is_another(cluster: Harness) -> None:
    said = await talk(cluster, "Hello", "/fork branch", "More", "/help", "/quit", options=("--session", "mine"))
    assert "session branch" in said and "/rewind" in said
    assert await sessions(cluster) == ["branch", "mine"]


async def test_mistakes_are_said_and_do_not_end_it(cluster: Harness) -> None:
    said = await talk(cluster, "/rewind 3", "/rewind x", "y " * 5000, "Hello", "/stats")
    assert "3 cannot be taken back" in said and "takes a number" in said
    assert "is longer than the model's context length" in said
    assert "8 out" in said
