"""What can be resumed from copies of pages that are not on the device."""

from __future__ import annotations

from collections.abc import Sequence

from workers.kv.page_table import GroupTables


def first_loaded(group: GroupTables, length: int, page_size: int) -> int:
    """The first column that a session of ``length`` tokens, a multiple of the page size, has in a group.

    As a window group holds it: the window before the next token, and one token more.
    """
    return max(0, length - group.window) // page_size if group.window else 0


def loadable_len(groups: Sequence[GroupTables], present: Sequence[Sequence[object]], first: int, page_size: int) -> int:
    """The greatest length from which every group can resume; ``first * page_size`` if that is all there is.

    ``present``: by group, something true where there is a copy of column ``first + i``. What comes before is on the
    device.
    """
    whole = [_num_in_row(there) for group, there in zip(groups, present, strict=True) if not group.window]
    end = first + min(whole, default=len(present[0]))
    windows = [(group, _rows_before(there)) for group, there in zip(groups, present, strict=True) if group.window]
    while end > first:
        length = end * page_size
        if all(
            end - in_row[end - first] <= max(first, first_loaded(group, length, page_size)) for group, in_row in windows
        ):
            return length
        end -= 1
    return first * page_size


def _num_in_row(there: Sequence[object]) -> int:
    """How many come first."""
    return next((i for i, each in enumerate(there) if not each), len(there))


def _rows_before(there: Sequence[object]) -> list[int]:
    """How many in a row end before each position, and at the end."""
    rows = [0]
    for each in there:
        rows.append(rows[-1] + 1 if each else 0)
    return rows
