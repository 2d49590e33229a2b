"""Sessions of several turns, in a closed or an open loop, each turn timed token by token.

As in the peers' serving benchmarks, the server is asked as clients ask it: over HTTP, streaming, with all history.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

import httpx

WORDS = ("list", "sorts", "its items", "in place", "returns", "none", "a key", "orders", "by what", "it gives", "while")


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of the server."""

    url: str
    model: str
    sessions: int = 16
    turns: int = 5
    input_words: int = 40
    """Of each message of the user."""
    output_tokens: int = 32
    concurrency: int = 8
    """Closed loop: sessions at once."""
    rate: float | None = None
    """Open loop: new sessions a second, at random times (Poisson), however many run."""
    think_s: float = 0.0
    """Between a session's turns."""
    seed: int = 0
    api_key: str | None = None


@dataclass(slots=True)
class TurnResult:
    """One turn as its client saw it. Times in seconds."""

    turn: int
    latency_s: float = 0.0
    first_token_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    """Between tokens: a chunk's wait, divided by its tokens where the server tells how many."""
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str = ""


async def run_load(load: Load) -> tuple[list[TurnResult], float]:
    """All turns, and how long they took together."""
    headers = {"Authorization": f"Bearer {load.api_key}"} if load.api_key else {}
    limits = httpx.Limits(max_connections=None)
    results: list[TurnResult] = []
    began = time.perf_counter()
    async with httpx.AsyncClient(base_url=load.url, headers=headers, timeout=None, limits=limits) as http:
        if load.rate is None:
            await _closed_loop(http, load, results)
        else:
            await _open_loop(http, load, results)
    return results, time.perf_counter() - began


async def _closed_loop(http: httpx.AsyncClient, load: Load, results: list[TurnResult]) -> None:
    numbers = iter(range(load.sessions))

    async def client() -> None:
        for number in numbers:
            await _session(http, load, number, results)

    await asyncio.gather(*(client() for _ in range(min(load.concurrency, load.sessions))))


async def _open_loop(http: httpx.AsyncClient, load: Load, results: list[TurnResult]) -> None:
    rng, tasks = random.Random(load.seed), []
    for number in range(load.sessions):
        tasks.append(asyncio.create_task(_session(http, load, number, results)))
        await asyncio.sleep(rng.expovariate(load.rate or 1.0))
    await asyncio.gather(*tasks)


async def _session(http: httpx.AsyncClient, load: Load, number: int, results: list[TurnResult]) -> None:
    """One session's turns; it ends with its first error."""
    rng, session_id = random.Random(f"{load.seed}/{number}"), f"bench-{uuid.uuid4().hex}"
    messages: list[dict[str, str]] = []
    for turn in range(1, load.turns + 1):
        messages.append({"role": "user", "content": " ".join(rng.choices(WORDS, k=load.input_words))})
        result = TurnResult(turn)
        results.append(result)
        try:
            messages.append({"role": "assistant", "content": await _turn(http, load, session_id, messages, result)})
        except (httpx.HTTPError, ValueError, KeyError) as error:
            result.error = str(error) or type(error).__name__
            break
        await asyncio.sleep(load.think_s)
    await http.request("DELETE", f"/holdfast/sessions/{session_id}")  # other servers answer 404


async def _turn(
    http: httpx.AsyncClient, load: Load, session_id: str, messages: list[dict[str, str]], result: TurnResult
) -> str:
    body: dict[str, Any] = {"model": load.model, "messages": messages, "max_tokens": load.output_tokens, "stream": True}
    body |= {"ignore_eos": True, "seed": load.seed}
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    began = last = time.perf_counter()
    answer, num_tokens = "", 0
    async with http.stream("POST", "/v1/chat/completions", json=body, headers={"X-Session-ID": session_id}) as stream:
        if stream.is_error:
            raise ValueError(f"{stream.status_code}: {(await stream.aread()).decode()[:200]}")
        async for line in stream.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise ValueError(str(event["error"])[:200])
            now = time.perf_counter()
            usage = event.get("usage") or {}
            if event["choices"]:
                before, num_tokens = num_tokens, usage.get("completion_tokens", num_tokens + 1)
                answer += event["choices"][0]["delta"].get("content") or ""
                if not before:
                    result.first_token_s = now - began
                else:
                    new = max(1, num_tokens - before)
                    result.gaps_s += [(now - last) / new] * new
                last = now
            if usage:
                result.input_tokens, result.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
                result.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    result.latency_s = time.perf_counter() - began
    return answer
