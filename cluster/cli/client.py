"""Calls to a router, and tables of their answers."""

from __future__ import annotations

import json
import sys
from typing import Any

import click
import httpx
from rich.console import Console
from rich.table import Table

from holdfast.errors import HoldfastError

DEFAULT_URL = "http://127.0.0.1:8000"
CLIENT_TIMEOUT_S = 15.0


def url_option(command: Any) -> Any:
    """``--url``."""
    return click.option(
        "--url", envvar="HOLDFAST_URL", default=DEFAULT_URL, show_default=True, show_envvar=True, help="a router"
    )(command)


def client_options(command: Any) -> Any:
    """The options of every command that calls a router: ``--url``, ``--api-key``, ``--json``."""
    command = click.option("--json", "as_json", is_flag=True, help="print JSON")(command)
    command = click.option("--api-key", envvar="HOLDFAST_API_KEY", help="the tenant's key")(command)
    return url_option(command)


def ask(method: str, url: str, path: str, api_key: str | None, timeout_s: float = CLIENT_TIMEOUT_S) -> httpx.Response:
    """A router's answer. Raises HoldfastError if there is none, or if it is an error."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        answer = httpx.request(method, url + path, headers=headers, timeout=timeout_s)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise HoldfastError(f"no router answers at {url}: {error}") from None
    if answer.is_error:
        raise HoldfastError(f"{url} answered {answer.status_code}: {answer.text}")
    return answer


def ray_address(url: str, api_key: str | None) -> str:
    """The Ray cluster that the router at ``url`` runs on. Raises HoldfastError."""
    return str(call("GET", url, "/holdfast/router", api_key)["control_plane"])


def call(method: str, url: str, path: str, api_key: str | None, timeout_s: float = CLIENT_TIMEOUT_S) -> Any:
    """As ``ask``, of an endpoint that answers with JSON."""
    try:
        return ask(method, url, path, api_key, timeout_s).json()
    except ValueError:
        raise HoldfastError(f"{url} is not a Holdfast router: its answer is not JSON") from None


def get_rows(url: str, path: str, api_key: str | None) -> list[dict[str, Any]]:
    """A router's answer that is a list."""
    rows: list[dict[str, Any]] = call("GET", url, path, api_key)
    return rows


def print_rows(rows: list[dict[str, Any]], columns: dict[str, str], as_json: bool) -> None:
    """Print a table with the keys and titles of ``columns``, or all of it as JSON."""
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    table = Table(*columns.values())
    for row in rows:
        table.add_row(*(str(row.get(key, "")) for key in columns))
    # Piped output is not cut to a terminal's width.
    Console(width=None if sys.stdout.isatty() else 200).print(table)
