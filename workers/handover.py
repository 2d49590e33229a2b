"""A session's KV goes from one worker to another: what the leaders do, and what each rank's thread does.

On the source the session is forked for reading: its pages are held as shared ones, which nobody writes
(law L4). On the target a hand-over is a turn whose KV is read in place of computed: it resumes the
session's slot, extends it, and commits when every rank has its pages. So pages, references and lengths
change by the step log alone (law L8), and what ends half way ends as any turn does (law L7).
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from holdfast.errors import HandoverRefused, SessionBusy, SessionNotFound, StaleEpoch
from holdfast.v1 import rank_pb2
from workers.kv import Outcome, Slot
from workers.kv.prefix import common_prefix_len
from workers.rank import Rank

if TYPE_CHECKING:
    from workers.leader import Leader

MAX_RELEASED = 1024
"""Sessions that are remembered as released, so that a hand-over that comes late brings none of them back."""


@dataclass(frozen=True, slots=True)
class Held:
    """A session as it is held for a reader."""

    tenant: str
    tokens: array[int]
    committed_len: int


@dataclass(frozen=True, slots=True)
class Arriving:
    """A session whose KV is being read. Pages ``[first_page, end_page)`` of its table are to come."""

    transfer_id: str
    epoch: int
    tokens: array[int]
    cached_len: int
    committed_len: int
    first_page: int
    end_page: int
    is_new: bool
    """It had no slot here before."""


class Handovers:
    """Those of one leader. Methods that give a future are called from any thread."""

    def __init__(self, leader: Leader) -> None:
        self._leader = leader
        self._held: dict[str, str] = {}
        self._arriving: dict[str, Arriving] = {}
        self._released: OrderedDict[str, int] = OrderedDict()

    def is_under_way(self, slot: Slot) -> bool:
        """Whether this slot is no session yet, or only holds one's pages for a reader."""
        return slot.session_id in self._held or slot.session_id in self._arriving

    # ---- source -------------------------------------------------------------------------------------

    def hold(self, session_id: str, transfer_id: str) -> Future[Held]:
        """Hold an idle session's pages until ``let_go``; done when every rank has.

        Raises SessionNotFound, SessionBusy, OutOfPages (no slot is free), HandoverRefused if there is
        nothing to read.
        """
        return self._leader.when_applied(partial(self._hold, session_id, transfer_id))

    def _hold(self, session_id: str, transfer_id: str) -> Held:
        cache, name = self._leader.cache, held_name(transfer_id)
        slot = cache.slots.get(session_id)
        if slot is None:
            raise SessionNotFound(f"session {session_id} has no KV here")
        if slot.turn_id is not None:
            raise SessionBusy(f"session {session_id} is busy with turn {slot.turn_id}")
        if slot.committed_len == 0:
            raise HandoverRefused(f"session {session_id} has no KV here")
        tokens = slot.tokens[:]
        cache.fork(session_id, name, for_reading=True)
        self._held[name] = session_id
        # As a running turn: what is read must not be evicted meanwhile.
        committed_len = cache.resume(name, transfer_id, tokens, len(tokens), match_prefix=False)
        return Held(slot.tenant, tokens, committed_len)

    def let_go(self, transfer_id: str) -> None:
        """The reader is done, or gone. Unknown: nothing happens."""

        self._leader.call(partial(self._let_go, held_name(transfer_id)))

    def _let_go(self, name: str) -> None:
        if self._held.pop(name, None) is not None:
            cache = self._leader.cache
            cache.finish(name, cache.slots[name].turn_id or "", Outcome.ABORTED)
            cache.release_session(name)
            self._leader.scheduler.made_room()

    def released(self, session_id: str, epoch: int) -> None:
        """In the leader's thread: nothing of the session stays on its way, from here or to here."""
        self.end(session_id)
        for name in [name for name, held in self._held.items() if held == session_id]:
            self._let_go(name)
        self._released[session_id] = epoch
        self._released.move_to_end(session_id)
        if len(self._released) > MAX_RELEASED:
            self._released.popitem(last=False)

    # ---- target -------------------------------------------------------------------------------------

    def begin(self, session_id: str, epoch: int, transfer_id: str, held: Held) -> Future[Arriving]:
        """Give the session a slot and pages for what is not cached here; done when every rank has.

        Raises StaleEpoch, SessionBusy, SessionExists, and HandoverRefused if there is no room but by
        dropping the KV of sessions that are here.
        """
        return self._leader.when_applied(partial(self._begin, session_id, epoch, transfer_id, held))

    def _begin(self, session_id: str, epoch: int, transfer_id: str, held: Held) -> Arriving:
        leader, cache, size = self._leader, self._leader.cache, self._leader.cache.page_size
        committed_len = held.committed_len
        leader.check_epoch(session_id, epoch)
        if epoch < self._released.get(session_id, 0):
            raise StaleEpoch(f"session {session_id} was released here under a later epoch than {epoch}")
        is_new = session_id not in cache.slots
        slot = cache.open(session_id, held.tenant)
        if slot.turn_id is not None or leader.scheduler.turn_of(session_id) is not None:
            raise SessionBusy(f"session {session_id} has a turn here")
        # To a page's start: a page comes whole, into one that is nobody else's.
        keep_len = common_prefix_len(slot.tokens, held.tokens) // size * size
        cached_len = cache.resume(session_id, transfer_id, held.tokens, keep_len)
        first_page, end_page = cached_len // size, max(cached_len // size, -(-committed_len // size))
        arriving = Arriving(transfer_id, epoch, held.tokens, cached_len, committed_len, first_page, end_page, is_new)
        self._arriving[session_id] = arriving
        if end_page - first_page > cache.pool.num_free + cache.pool.num_cached:
            self.end(session_id)
            raise HandoverRefused(f"{end_page - first_page} pages are needed, {cache.pool.num_free} are free")
        if committed_len > cached_len:
            cache.extend(session_id, committed_len - cached_len)
        return arriving

    def complete(self, session_id: str, transfer_id: str) -> Future[int]:
        """Every rank has its pages: they are as good as computed. Gives how many tokens the session has.

        Raises HandoverRefused if a turn or a release overtook it.
        """
        return self._leader.when_applied(partial(self._complete, session_id, transfer_id))

    def _complete(self, session_id: str, transfer_id: str) -> int:
        cache, arriving = self._leader.cache, self._arriving.get(session_id)
        if arriving is None or arriving.transfer_id != transfer_id:
            raise HandoverRefused(f"session {session_id} went on while its KV came")
        del self._arriving[session_id]
        reached = max(arriving.cached_len, arriving.committed_len)
        if reached > arriving.cached_len:
            cache.commit({session_id: arriving.tokens[arriving.cached_len : reached]})
        cache.finish(session_id, transfer_id, Outcome.COMPLETED, arriving.tokens[reached:])
        self._leader.remember_epoch(session_id, arriving.epoch)
        return reached

    def abandon(self, session_id: str, transfer_id: str) -> None:
        """It will not be completed: the session is here as it was before. Unknown: nothing happens."""

        def abandon() -> None:
            arriving = self._arriving.get(session_id)
            if arriving is not None and arriving.transfer_id == transfer_id:
                self.end(session_id)

        self._leader.call(abandon)

    def end(self, session_id: str) -> None:
        """As ``abandon``, in the leader's thread, for whatever comes first: a turn, a release."""
        arriving = self._arriving.pop(session_id, None)
        if arriving is None:
            return
        cache = self._leader.cache
        cache.finish(session_id, arriving.transfer_id, Outcome.ABORTED)
        if arriving.is_new:
            cache.release_session(session_id)
        self._leader.scheduler.made_room()


def held_name(transfer_id: str) -> str:
    """The slot that holds a transfer's pages on the source."""
    return f"handover/{transfer_id}"


def read_pages(rank: Rank, transfer_id: str, first_page: int, end_page: int) -> list[bytes]:
    """Bytes of a held session's pages. In the rank's thread. Raises HandoverRefused if it is held no more."""
    slot = rank.cache.slots.get(held_name(transfer_id))
    if slot is None or not 0 <= first_page < end_page <= len(slot.pages):
        raise HandoverRefused(f"pages {first_page} to {end_page} of transfer {transfer_id} are not held here")
    return rank.kv.read_pages(slot.pages[first_page:end_page])


def write_pages(rank: Rank, request: rank_pb2.FetchRequest, first_page: int, pages: list[bytes]) -> None:
    """Put pages that came into those that the log gave for them. In the rank's thread.

    Raises HandoverRefused if the session went on meanwhile: they may be another's by now.
    """
    slot = rank.cache.slots.get(request.session_id)
    if slot is None or slot.turn_id != request.transfer_id or not slot.running:
        raise HandoverRefused(f"session {request.session_id} went on while its KV came")
    rank.kv.write_pages(slot.pages[first_page : first_page + len(pages)], pages)
