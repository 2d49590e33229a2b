"""The store's index against a plain model: room is never given twice, and what is found is what was written."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from workers.store.copies import Copy, CopyIndex

SLAB = 1024
KEYS, OWNERS = st.integers(0, 30), st.sampled_from("abc")


class Store(RuleBasedStateMachine):
    """Keys, sizes and owners at random, over four slabs."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = bytearray(4 * SLAB)
        self.index = CopyIndex(4 * SLAB, SLAB, zeroed=memoryview(self.bytes))
        self.arena: dict[int, bytes] = {}
        """By offset: whose copy was written there last."""
        self.reserved: list[Copy] = []
        self.pinned: list[Copy] = []
        self.users: dict[bytes, set[str]] = {}
        """By key, the sessions that made or used the copy that there is."""
        self.released: set[bytes] = set()

    @staticmethod
    def key(number: int) -> bytes:
        return bytes([number % 3, number])

    @staticmethod
    def size(key: bytes) -> int:
        return (64, 192, 700)[key[0]]

    @rule(number=KEYS, owner=OWNERS)
    def reserve(self, number: int, owner: str) -> None:
        key = self.key(number)
        known = key in self.index._copies
        copy = self.index.reserve(key, self.size(key), owner)
        if known:
            assert copy is None
            self.users[key].add(owner)
        elif copy is not None:
            self.reserved.append(copy)
            self.users[key] = {owner}
            self.released.discard(key)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), write=st.booleans())
    def end_reservation(self, data: st.DataObject, write: bool) -> None:
        copy = self.reserved.pop(data.draw(st.integers(0, len(self.reserved) - 1)))
        if write:
            self.arena[copy.offset] = copy.key
            self.bytes[copy.offset : copy.offset + copy.num_bytes] = b"x" * copy.num_bytes
            self.index.complete(copy, copy.key[1])
        else:
            self.index.abandon(copy)

    @rule(number=KEYS, owner=OWNERS)
    def pin(self, number: int, owner: str) -> None:
        key = self.key(number)
        copy = self.index.pin(key, owner)
        if copy is not None:
            assert copy.crc == key[1] and key not in self.released
            self.users[key].add(owner)
            self.pinned.append(copy)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        self.index.unpin(self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1))))

    @rule(owner=OWNERS)
    def release(self, owner: str) -> None:
        alone = {key for key in self.index._copies if self.users[key] == {owner}}
        assert self.index.release(owner) == len(alone)
        self.released |= alone

    @rule()
    def flush(self) -> None:
        self.released |= set(self.index._copies)
        self.index.flush()
        assert not len(self.index)

    @invariant()
    def rooms_do_not_overlap(self) -> None:
        held = {id(copy): copy for copy in (*self.index._copies.values(), *self.reserved, *self.pinned)}
        spans = sorted((copy.offset, copy.offset + copy.size) for copy in held.values())
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        assert all(start // SLAB == (end - 1) // SLAB and end <= 4 * SLAB for start, end in spans)
        assert self.index.num_bytes_used == sum(end - start for start, end in spans)

    @invariant()
    def what_is_gone_is_overwritten(self) -> None:
        free = bytearray(self.bytes)
        for copy in (*self.index._copies.values(), *self.reserved, *self.pinned):
            free[copy.offset : copy.offset + copy.size] = bytes(copy.size)
        assert not any(free)

    @invariant()
    def what_is_read_was_not_written_since(self) -> None:
        assert all(self.arena[copy.offset] == copy.key for copy in self.pinned)


TestStore = Store.TestCase
TestStore.settings = settings(max_examples=150, stateful_step_count=60, suppress_health_check=[HealthCheck.too_slow])


def test_the_longest_unused_session_gives_way_from_its_end() -> None:
    index = CopyIndex(4 * SLAB, SLAB)
    for owner in "ab":
        for i in range(8):
            copy = index.reserve(f"{owner}{i}".encode(), 256, owner)
            assert copy is not None
            index.complete(copy, 0)
    pinned = index.pin(b"a0", "a")
    assert pinned is not None, "session a is used last"
    for i in range(5):
        copy = index.reserve(f"c{i}".encode(), 256, "c")
        assert copy is not None
        index.complete(copy, 0)
    there = {key.decode() for key in index._copies}
    assert there == {*(f"a{i}" for i in range(8)), "b0", "b1", "b2", *(f"c{i}" for i in range(5))}


@pytest.mark.parametrize("size", [SLAB + 1, 10 * SLAB])
def test_a_copy_larger_than_a_slab_is_not_kept(size: int) -> None:
    index = CopyIndex(4 * SLAB, SLAB)
    assert index.reserve(b"k", size, "a") is None and index.counters["no_room"] == 1
    assert CopyIndex(SLAB - 1, SLAB).reserve(b"k", 1, "a") is None
