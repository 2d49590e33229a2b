"""Which copies of a history are loaded, and from where on it is computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from workers.engine.migration import Columns
from workers.kv.loadable import first_loaded, loadable_len
from workers.kv.page_table import GroupTables
from workers.serving.bandwidth import Bandwidth


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """A load of the copies that some tiers have."""

    reached: int
    """Tokens whose KV is there after the load."""
    columns: Columns
    pages: Mapping[int, int]
    """By tier, how many pages it gives."""
    bytes: Mapping[int, int]
    """By tier, of all ranks."""

    @property
    def slowest(self) -> int:
        """The tier that the load waits for."""
        return max(self.bytes)


def load_plans(
    groups: Sequence[GroupTables],
    tiers: Sequence[Sequence[int]],
    first: int,
    page_size: int,
    page_bytes: Sequence[int],
) -> Iterator[LoadPlan]:
    """The longest load from each choice of tiers; none where nothing can be loaded.

    ``tiers``: by group, the tier that has column ``first + i``, or 0. ``page_bytes``: by group, of all ranks.
    """
    there = sorted({tier for part in tiers for tier in part if tier})
    for count in range(1, len(there) + 1):
        for chosen in combinations(there, count):
            present = [[tier in chosen for tier in part] for part in tiers]
            reached = loadable_len(groups, present, first, page_size)
            if reached > first * page_size:
                yield _plan(groups, tiers, first, reached, page_size, page_bytes)


def _plan(
    groups: Sequence[GroupTables],
    tiers: Sequence[Sequence[int]],
    first: int,
    reached: int,
    page_size: int,
    page_bytes: Sequence[int],
) -> LoadPlan:
    columns, pages, num_bytes = list[list[int]](), dict[int, int](), dict[int, int]()
    for group, part in zip(groups, tiers, strict=True):
        wanted = list(range(max(first, first_loaded(group, reached, page_size)), reached // page_size))
        columns.append(wanted)
        for column in wanted:
            tier = part[column - first]
            pages[tier] = pages.get(tier, 0) + 1
            num_bytes[tier] = num_bytes.get(tier, 0) + page_bytes[group.index]
    return LoadPlan(reached, columns, pages, num_bytes)


def seconds_until_there(
    plan: LoadPlan | None, known_len: int, length: int, bandwidths: Mapping[int, Bandwidth], tokens_per_s: float
) -> float:
    """How long it takes until a history of ``length`` tokens is there: to load, and to compute what comes after.

    A bandwidth that was never measured counts as infinite: so it is measured.
    """
    if plan is None:
        return (length - known_len) / tokens_per_s
    load_s = sum(bandwidths[tier].seconds(num_bytes) for tier, num_bytes in plan.bytes.items())
    return load_s + (length - plan.reached) / tokens_per_s


def measure(plan: LoadPlan, num_bytes: int, seconds: float, bandwidths: Mapping[int, Bandwidth]) -> None:
    """A load of so much took so long. What faster tiers take of it is known; the rest is the slowest one's."""
    slowest = plan.slowest
    others = {tier: size for tier, size in plan.bytes.items() if tier != slowest}
    if not others or num_bytes == sum(plan.bytes.values()):
        rest = seconds - sum(bandwidths[tier].seconds(size) for tier, size in others.items())
        bandwidths[slowest].measured(num_bytes - sum(others.values()), max(rest, 0.0))
