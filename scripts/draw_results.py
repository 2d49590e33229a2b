"""Draw ``docs/pauses.svg`` from ``benchmarks/results/chaos.json``: a turn's longest pause, by fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROOT = Path(__file__).parent.parent
WIDTH, LABEL_WIDTH, ROW_HEIGHT, TOP = 820, 260, 26, 58
MAX_S = 8.0
"""The end of the time axis."""


def draw(pauses: dict[str, dict[str, float]], title: str) -> str:
    """An SVG with one row a fault: a bar up to p50, a line up to p99. ``pauses``: p50 and p99 in seconds."""
    rows = sorted(pauses.items(), key=lambda item: item[1]["p50"])
    height = TOP + ROW_HEIGHT * len(rows) + 34

    def x(seconds: float) -> float:
        return LABEL_WIDTH + (WIDTH - LABEL_WIDTH - 30) * min(seconds, MAX_S) / MAX_S

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="16" y="24" font-size="15" font-weight="bold" fill="#222">{escape(title)}</text>',
        '<text x="16" y="43" font-size="12" fill="#555">seconds; bar: p50, line: p99</text>',
    ]
    for second in range(int(MAX_S) + 1):
        parts.append(f'<line x1="{x(second)}" y1="{TOP - 6}" x2="{x(second)}" y2="{height - 30}" stroke="#e4e4e4"/>')
        parts.append(
            f'<text x="{x(second)}" y="{height - 14}" font-size="11" fill="#555" text-anchor="middle">{second}</text>'
        )
    for number, (fault, pause) in enumerate(rows):
        y = TOP + ROW_HEIGHT * number
        parts.append(
            f'<text x="{LABEL_WIDTH - 10}" y="{y + 13}" font-size="12" fill="#222" text-anchor="end">'
            f"{escape(fault)}</text>"
        )
        parts.append(f'<rect x="{x(0)}" y="{y + 2}" width="{x(pause["p50"]) - x(0)}" height="14" fill="#3b78a8"/>')
        parts.append(
            f'<line x1="{x(pause["p50"])}" y1="{y + 9}" x2="{x(pause["p99"])}" y2="{y + 9}" '
            'stroke="#3b78a8" stroke-width="2"/>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    results: dict[str, Any] = json.loads((ROOT / "benchmarks/results/chaos.json").read_text())
    report = results["200 faults"]
    pauses = report["by fault, of the turns whose longest pause it fell into, s"]
    title = f"Longest pause of a turn among 200 faults ({report['turns']:,} turns, no token lost)"
    (ROOT / "docs/pauses.svg").write_text(draw(pauses, title))


if __name__ == "__main__":
    main()
