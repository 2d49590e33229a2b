"""``holdfast chat``: a conversation on a session, from a terminal."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import click
import httpx

from cluster.cli.client import CLIENT_TIMEOUT_S, call, url_option
from holdfast.errors import HoldfastError

HELP = """/rewind [N]  take back the last N turns (default 1)
/fork [ID]   continue on another session from here; this one stays as it is
/stats       tokens, cached tokens and speed of the last turn
/quit        leave (Ctrl-D)"""


class Conversation:
    """The messages so far, and the session that holds them."""

    def __init__(self, url: str, api_key: str | None, session_id: str, settings: dict[str, Any], system: str) -> None:
        self.session_id = session_id
        self.messages = [{"role": "system", "content": system}] if system else []
        self._url, self._settings = url, settings
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.stats = "no turn yet"

    @property
    def num_turns(self) -> int:
        return sum(message["role"] == "assistant" for message in self.messages)

    def say(self, text: str) -> Iterator[str]:
        """Send a message. Yields the answer piece by piece.

        Raises HoldfastError; the conversation is as before then.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        body = self._settings | {"messages": asked, "stream": True, "stream_options": {"include_usage": True}}
        headers = self._headers | {"X-Session-ID": self.session_id}
        began, first, answer = time.monotonic(), 0.0, ""
        usage: dict[str, Any] = {}
        try:
            with httpx.stream(
                "POST", f"{self._url}/v1/chat/completions", json=body, headers=headers, timeout=None
            ) as response:
                if response.is_error:
                    raise HoldfastError(json.loads(response.read())["error"]["message"])
                for event in _events(response.iter_lines()):
                    usage = event.get("usage") or usage
                    for choice in event["choices"]:
                        piece = choice["delta"].get("content") or ""
                        first = first or time.monotonic() - began
                        answer += piece
                        yield piece
        except httpx.HTTPError as error:
            raise HoldfastError(f"the stream from {self._url} broke: {error}") from None
        self.messages = [*asked, {"role": "assistant", "content": answer}]
        self.stats = _stats(usage, first, time.monotonic() - began)

    def rewind(self, num_turns: int) -> None:
        """Drop the last turns; the next one cuts the session. Raises HoldfastError if there are fewer."""
        if not 0 < num_turns <= self.num_turns:
            raise HoldfastError(f"there are {self.num_turns} turns, {num_turns} cannot be taken back")
        del self.messages[len(self.messages) - 2 * num_turns :]


def _events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith("data: ") and line != "data: [DONE]":
            event = json.loads(line[6:])
            if "error" in event:
                raise HoldfastError(event["error"]["message"])
            yield event


def _stats(usage: dict[str, Any], first_s: float, all_s: float) -> str:
    cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    num_tokens = usage.get("completion_tokens", 0)
    speed = max(0, num_tokens - 1) / max(1e-9, all_s - first_s)
    return (
        f"{usage.get('prompt_tokens', 0)} tokens in ({cached} cached), {num_tokens} out, "
        f"first after {first_s:.3f} s, then {speed:.1f} tokens/s"
    )


@click.command()
@url_option
@click.option("--api-key", envvar="HOLDFAST_API_KEY", help="the tenant's key")
@click.option("--session", help="id of the session, which stays; default: a new one, which is released at the end")
@click.option("--system", default="", help="the system message")
@click.option("--max-tokens", type=int, help="of an answer")
@click.option("--temperature", type=float, default=1.0, show_default=True)
def chat(
    url: str, api_key: str | None, session: str | None, system: str, max_tokens: int | None, temperature: float
) -> None:
    """Talk with the model on a session. /help lists the commands."""
    settings = {"temperature": temperature} | ({"max_tokens": max_tokens} if max_tokens else {})
    talk = Conversation(url, api_key, session or f"chat-{uuid.uuid4().hex}", settings, system)
    own = [] if session else [talk.session_id]
    click.echo(f"session {talk.session_id}; /help lists the commands")
    try:
        while (line := _read()) is not None:
            try:
                if line.startswith("/"):
                    _command(talk, own, line)
                elif line:
                    for piece in talk.say(line):
                        click.echo(piece, nl=False)
                    click.echo()
            except HoldfastError as error:
                click.echo(f"holdfast: {error.message}", err=True)
    finally:
        for session_id in own:
            _release(url, session_id, api_key)


def _read() -> str | None:
    try:
        line: str = click.prompt("", prompt_suffix="> ", default="", show_default=False).strip()
    except click.Abort:  # the input's end
        return None
    return None if line == "/quit" else line


def _command(talk: Conversation, own: list[str], line: str) -> None:
    name, _, rest = line.partition(" ")
    if name == "/rewind":
        if rest and not rest.isdecimal():
            raise HoldfastError("/rewind takes a number of turns")
        talk.rewind(int(rest or 1))
        click.echo(f"{talk.num_turns} turns are left")
    elif name == "/fork":
        talk.session_id = rest or f"chat-{uuid.uuid4().hex}"
        own += [] if rest else [talk.session_id]
        click.echo(f"session {talk.session_id}")
    elif name == "/stats":
        click.echo(talk.stats)
    else:
        click.echo(HELP)


def _release(url: str, session_id: str, api_key: str | None) -> None:
    with suppress(HoldfastError):  # it never had a turn, or the router is gone
        call("DELETE", url, f"/holdfast/sessions/{session_id}", api_key, CLIENT_TIMEOUT_S)
