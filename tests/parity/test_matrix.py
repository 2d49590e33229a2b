"""The matrix of docs/models.md, played again: session features by kinds of KV."""

from __future__ import annotations

import pytest

from tests.parity.matrix import BEGIN, DOCUMENT, END, FEATURES, KINDS


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("kind", KINDS)
def test_cell(kind: str, feature: str) -> None:
    table = DOCUMENT.read_text().split(BEGIN)[1].split(END)[0]
    cells = next(line for line in table.splitlines() if line.startswith(f"| {feature} |")).split("|")
    assert FEATURES[feature](kind) == int(cells[2 + list(KINDS).index(kind)]), "docs/models.md counts other cases"
