"""The figures of a load: percentiles by turn number, as JSON, a table's rows, and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cluster.bench.load import TurnResult

PERCENTILES = (50, 95, 99)
WIDTH, HEIGHT, MARGIN = 640, 320, 48
COLORS = ("#1f77b4", "#ff7f0e", "#d62728")


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least ``percent`` % of the values do not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] if ordered else 0.0


def report(results: Sequence[TurnResult], seconds: float) -> dict[str, Any]:
    """All figures; times in milliseconds."""
    done = [result for result in results if not result.error]
    num_output = sum(result.output_tokens for result in done)
    return {
        "turns": len(done),
        "errors": sorted({result.error for result in results if result.error}),
        "failed turns": len(results) - len(done),
        "seconds": round(seconds, 3),
        "turns a second": round(len(done) / seconds, 3),
        "output tokens a second": round(num_output / seconds, 1),
        "all turns": _figures(done),
        "by turn": {
            str(turn): _figures([result for result in done if result.turn == turn])
            for turn in sorted({result.turn for result in done})
        },
    }


def _figures(results: Sequence[TurnResult]) -> dict[str, Any]:
    num_input = sum(result.input_tokens for result in results)
    gaps = [gap for result in results for gap in result.gaps_s]
    return {
        "turns": len(results),
        "first token ms": _percentiles([result.first_token_s for result in results]),
        "between tokens ms": _percentiles(gaps),
        "latency ms": _percentiles([result.latency_s for result in results]),
        "input tokens": num_input,
        "cached share": round(sum(result.cached_tokens for result in results) / max(1, num_input), 4),
    }


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    return {f"p{percent}": round(percentile(seconds, percent) * 1e3, 2) for percent in PERCENTILES}


def rows(figures: dict[str, Any]) -> list[dict[str, Any]]:
    """One row a turn number, and one for all."""
    return [
        {"turn": name, "turns": known["turns"], "cached": f"{known['cached share']:.1%}"}
        | {key: " / ".join(f"{value:g}" for value in known[key].values()) for key in known if key.endswith(" ms")}
        for name, known in [*figures["by turn"].items(), ("all", figures["all turns"])]
    ]


def plot(figures: dict[str, Any]) -> str:
    """An SVG of the time to the first token by turn number, a line a percentile."""
    turns = list(figures["by turn"])
    known = [figures["by turn"][turn]["first token ms"] for turn in turns]
    top = max((values[f"p{PERCENTILES[-1]}"] for values in known), default=0.0) or 1.0

    def point(index: int, value: float) -> str:
        x = MARGIN + (WIDTH - 2 * MARGIN) * index / max(1, len(turns) - 1)
        return f"{x:.1f},{HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * value / top:.1f}"

    lines = []
    for percent, color in zip(PERCENTILES, COLORS, strict=True):
        points = " ".join(point(i, values[f"p{percent}"]) for i, values in enumerate(known))
        lines.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
        lines.append(
            f'<text x="{WIDTH - MARGIN + 4}" y="{MARGIN + 16 * len(lines) // 2}" fill="{color}">p{percent}</text>'
        )
    labels = [
        f'<text x="{point(i, 0).split(",")[0]}" y="{HEIGHT - MARGIN + 18}" text-anchor="middle">{turn}</text>'
        for i, turn in enumerate(turns)
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" '
            'font-size="12">',
            f'<text x="{MARGIN}" y="20">ms to the first token, by turn (0 to {top:g})</text>',
            f'<rect x="{MARGIN}" y="{MARGIN}" width="{WIDTH - 2 * MARGIN}" height="{HEIGHT - 2 * MARGIN}" '
            'fill="none" stroke="#999"/>',
            *lines,
            *labels,
            "</svg>\n",
        ]
    )
