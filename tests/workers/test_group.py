"""Laws L8 and L9 in a group: the same log gives the same state, on all ranks or none."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

import pytest

from holdfast.errors import HoldfastError, RankDiverged, SessionBusy, StaleEpoch
from holdfast.tokens import pack_tokens
from holdfast.v1 import rank_pb2, worker_pb2
from holdfast.wire import LAST_EPOCH
from tests.workers.engine import SMALL, Engine
from tests.workers.groups import GroupEngine
from workers.engine.step_log import LogReader, LogWriter, RecordedCache
from workers.kv import full_group
from workers.kv.slot import new_tokens
from workers.scheduling import SamplingParams

SHORT = SamplingParams(max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=16, ignore_eos=True, temperature=0.9, top_k=50, seed=5, num_logprobs=2)


@pytest.fixture
def group() -> Iterator[GroupEngine]:
    engine = GroupEngine(2)
    yield engine
    engine.stop()


def prompt(seed: int, length: int) -> list[int]:
    return [5 + (seed * 131 + i * 17) % 2000 for i in range(length)]


# ---- the same tokens, whatever the number of ranks -------------------------------------------------


@pytest.mark.parametrize("size", [2, 4])
def test_outputs_equal_those_of_one_rank_under_chunking_and_retract(size: int) -> None:
    # A small pool and small steps: prompts are chunked, turns are retracted, idle sessions evicted.
    tight = {"max_total_tokens": 100, "chunked_prefill_size": 24, "page_size": 4}
    engines = [Engine(SMALL, **tight), GroupEngine(size, SMALL, **tight)]
    for engine in engines:
        for i in range(6):
            engine.submit(f"t{i}", f"s{i % 4}" if i < 4 else f"r{i}", prompt(i, 16 + i), SAMPLED)
        engine.run()
    one, many = engines
    assert many.scheduler.num_retracted > 0, "pages ran out"
    for i in range(6):
        assert one.output(f"t{i}") == many.output(f"t{i}")
    assert isinstance(many, GroupEngine) and not many.refused
    many.stop()


def test_a_page_that_is_copied_before_it_is_written_is_copied_on_every_rank(group: GroupEngine) -> None:
    """Two sessions share a page that is partly full, and both go on: the digest covers the copy's references."""
    output = group.generate("s", prompt(1, 20))
    history = [*prompt(1, 20), *output]
    group.leader.fork("s", "child", 1, 27)
    group.commands()
    for session, known in (("child", history[:27]), ("s", history)):
        assert group.generate(session, [*known, 7]) == Engine().generate(session, [*known, 7])
    assert not group.refused


def test_logprobs_of_input_and_output_equal_those_of_one_rank(group: GroupEngine) -> None:
    params = SamplingParams(max_tokens=4, ignore_eos=True, num_logprobs=3, logprob_start=2)
    alone = Engine()
    for engine in (alone, group):
        engine.submit("t", "s", prompt(1, 12), params)
        engine.run()
    for kind in ("logprobs", "input_logprobs"):
        ours, theirs = ([lp for u in e.updates["t"] for lp in getattr(u, kind)] for e in (alone, group))
        assert [lp.token for lp in ours] == [lp.token for lp in theirs] and len(ours) > 2
        assert [lp.logprob for lp in ours] == pytest.approx([lp.logprob for lp in theirs], abs=1e-4)


def play(engine: Engine, seed: int) -> tuple[dict[str, list[int]], list[object]]:
    """One random schedule of turns, releases, cuts, forks and aborts, the same on any engine."""
    rng = random.Random(seed)
    turn_ids, results = itertools.count(), []
    for _ in range(rng.randint(4, 10)):
        session = rng.choice("abcde")
        kind = rng.choice(["turn", "turn", "turn", "step", "step", "release", "cut", "abort", "fork", "flush"])
        if kind == "turn":
            # Several at once, so that pages run out and turns are retracted.
            for name in rng.sample("abcde", rng.randint(1, 4)):
                known = list(engine.cache.slots[name].tokens) if name in engine.cache.slots else []
                keep = rng.randint(0, len(known)) if rng.random() < 0.3 else len(known)
                tokens = known[:keep] + prompt(rng.randint(0, 3), rng.randint(1, 30))
                engine.submit(f"t{next(turn_ids)}", name, tokens, rng.choice([SHORT, SAMPLED]))
        elif kind == "step":
            for _ in range(rng.randint(1, 4)):
                engine.leader.step()
        elif kind == "abort":
            live = sorted(engine.scheduler.turns)
            if live:
                engine.leader.abort(rng.choice(live))
        elif kind == "release":
            results.append(engine.leader.release_session(session, 1, after_turn=rng.random() < 0.3))
        elif kind == "cut":
            results.append(engine.leader.free_tail(session, 1, rng.randint(0, 40)))
        elif kind == "fork":
            results.append(engine.leader.fork(session, f"{session}{next(turn_ids)}", 1, None))
        else:
            results.append(engine.leader.flush())
        engine.commands()
        engine.leader.step()
    engine.run()
    answers: list[object] = []
    for future in results:
        try:
            answer = future.result(10)
            freed = (
                [r.pages_freed for r in answer.ranks] if isinstance(answer, worker_pb2.ControlResponse) else [answer]
            )
            assert len(set(freed)) == 1, "every rank frees the same pages"
            answers.append(freed[0])
        except HoldfastError as error:
            answers.append(type(error))
    report = engine.leader.audit()
    engine.commands()
    engine.leader.step()
    if isinstance(engine, GroupEngine):
        engine.settle()
        assert not engine.refused
    audit = report.result(10)
    assert audit.ok and len({rank.digest for rank in audit.ranks}) == 1
    outputs = {turn: engine.output(turn) for turn in engine.updates}
    # The next schedule begins with an empty cache, and as many pages.
    for name in list(engine.cache.slots):
        engine.leader.release_session(name, LAST_EPOCH)
    engine.leader.flush()
    engine.commands()
    engine.updates.clear()
    assert engine.cache.groups[0].pool.num_free == engine.cache.groups[0].pool.num_pages
    return outputs, answers


def test_random_schedules_equal_those_of_one_rank(long: bool) -> None:
    tight = {"max_total_tokens": 96, "chunked_prefill_size": 32, "page_size": 4}
    one, two = Engine(SMALL, **tight), GroupEngine(2, SMALL, **tight)
    for seed in range(500 if long else 25):
        assert play(one, seed) == play(two, seed), f"seed {seed}"
    assert one.scheduler.num_retracted == two.scheduler.num_retracted > 0
    two.stop()


# ---- the control plane ------------------------------------------------------------------------------


def test_release_and_free_tail_answer_for_every_rank_at_one_index(group: GroupEngine) -> None:
    group.generate("s", prompt(1, 40))
    cut = group.leader.free_tail("s", 1, 17)
    group.commands()
    assert not cut.done(), "no rank has received it yet"
    group.leader.step()
    group.settle()
    answer = cut.result(5)
    assert [rank.rank for rank in answer.ranks] == [0, 1]
    assert {rank.log_index for rank in answer.ranks} == {answer.log_index} == {group.leader.log.last_index}
    assert len({rank.digest for rank in answer.ranks}) == 1
    # 51 committed tokens are 4 pages of 16, 17 are 2; the index keeps the full one of those cut.
    assert {rank.pages_freed for rank in answer.ranks} == {1}
    released = group.leader.release_session("s", 1)
    group.commands()
    group.leader.step()
    group.settle()
    assert {rank.pages_freed for rank in released.result(5).ranks} == {3}
    for cache in (group.cache, group.followers[1].rank.cache):
        assert cache.groups[0].pool.num_free == cache.groups[0].pool.num_pages and not cache.slots


def test_a_release_ends_the_turn_that_another_release_waits_for(group: GroupEngine) -> None:
    group.submit("t", "s", prompt(1, 40))
    group.leader.step()
    waiting = group.leader.release_session("s", 1, after_turn=True)
    now = group.leader.release_session("s", 1)
    group.commands()
    group.leader.step()
    group.settle()
    for future in (waiting, now):
        freed = [rank.pages_freed for rank in future.result(5).ranks]
        assert freed[0] == freed[1], freed
    assert not group.refused and not group.cache.slots


def test_a_request_that_is_refused_changes_no_rank(group: GroupEngine) -> None:
    group.generate("s", prompt(1, 20))
    group.submit("t", "s", prompt(1, 50), epoch=5)
    group.leader.step()
    stale = group.leader.release_session("s", 4)
    busy = group.leader.free_tail("s", 5, 0)
    group.commands()
    with pytest.raises(StaleEpoch):
        stale.result(1)
    with pytest.raises(SessionBusy):
        busy.result(1)
    group.run()
    assert not group.refused and len(group.output("t")) == 12


def test_tokens_wait_for_the_acks_of_their_step() -> None:
    group = GroupEngine(2)
    withheld: list[rank_pb2.Ack] = []
    group.followers[1]._send_ack = withheld.append
    group.submit("t", "s", prompt(1, 10), SHORT)
    for _ in range(4):
        group.leader.step()
    assert group.scheduler.turns["t"].num_output == 3, "planning continues, one step ahead"
    assert "t" not in group.updates, "nothing is shown"
    group.leader.log.ack(1, withheld[0])
    assert group.output("t") == list(group.scheduler.turns["t"].tokens[10:11]), "the first step's token, no more"
    for ack in withheld[1:3]:
        group.leader.log.ack(1, ack)
    assert len(group.output("t")) == 3
    group.stop()


# ---- corruption: caught by the digest at that very step ---------------------------------------------


def skip_a_free_tail(group: GroupEngine) -> None:
    cache = group.followers[1].rank.cache
    cache.free_tail = lambda session_id, keep_len: 0  # type: ignore[method-assign]


def free_a_page_twice(group: GroupEngine) -> None:
    cache = group.followers[1].rank.cache
    cut = cache._cut

    def twice(slot, keep_len: int) -> int:  # type: ignore[no-untyped-def]
        freed = cut(slot, keep_len)
        held = next(s for s in cache.slots.values() if s.tables[0].pages)
        if freed and cache.index.entry_of(0, held.tables[0].pages[-1]) is None:
            cache.groups[0].pool.decref(held.tables[0].pages[-1])
        return freed

    cache._cut = twice  # type: ignore[method-assign]


def flip_a_refcount(group: GroupEngine) -> None:
    cache = group.followers[1].rank.cache
    # Past the core: memory that changed by itself, of a page that this step touches.
    page = cache.slots["s"].tables[0].pages[-1]
    cache.groups[0].pool.refcounts[page] ^= 2


def forget_a_page_of_a_table(group: GroupEngine) -> None:
    slot = group.followers[1].rank.cache.slots["s"]
    slot.tables[0].pages[-1] = group.followers[1].rank.cache.groups[0].pool.free_pages()[0]


CORRUPTIONS: dict[str, Callable[[GroupEngine], None]] = {
    "skips one free_tail": skip_a_free_tail,
    "frees one page twice": free_a_page_twice,
    "flips one refcount": flip_a_refcount,
    "has another page in a table": forget_a_page_of_a_table,
}


@pytest.mark.parametrize("case", CORRUPTIONS)
def test_a_corrupt_rank_is_caught_at_that_very_step(case: str, group: GroupEngine) -> None:
    # Two sessions; neither's last page is full, so that a cut gives pages back to the pool.
    group.generate("other", prompt(2, 20))
    group.generate("s", prompt(1, 40))
    CORRUPTIONS[case](group)
    answer = group.leader.free_tail("s", 1, 10)
    group.commands()
    group.leader.step()
    group.settle()
    at = group.leader.log.last_index
    assert group.refused[1][0] == at, f"{case}: caught at {group.refused}, done at {at}"
    assert not answer.done(), "it is not answered"
    print(f"{case}: done in entry {at}, refused at entry {at}: {group.refused[1][1]}")


def test_steps_out_of_order_are_refused(group: GroupEngine) -> None:
    group.generate("s", prompt(1, 20))
    send, kept = group.send, []
    group.send = kept.append  # type: ignore[method-assign,assignment]
    group.leader._replication.send = group.send
    for keep_len in (12, 3):
        group.leader.free_tail("s", 1, keep_len)
        group.commands()
        group.leader.step()
    for entry in reversed(kept):
        send(entry)
    group.settle()
    assert group.refused[1] == (kept[0].index, f"entry {kept[1].index} came after entry {kept[0].index - 1}")


def test_an_entry_of_another_incarnation_is_refused() -> None:
    cache = RecordedCache([full_group(8)], 4)
    entry = LogWriter(incarnation=2, num_followers=1).append([], None, cache.digest())
    with pytest.raises(RankDiverged, match="entry of incarnation 2, this rank is of 1"):
        LogReader(RecordedCache([full_group(8)], 4), incarnation=1).apply(entry)


def test_an_entry_that_cannot_be_applied_is_refused_not_half_believed() -> None:
    cache = RecordedCache([full_group(8)], 4)
    reader, writer = LogReader(RecordedCache([full_group(8)], 4), 1), LogWriter(1, 1)
    op = rank_pb2.Op(extend=rank_pb2.ExtendOp(rows=pack_tokens(new_tokens([3])), num_tokens=1))
    with pytest.raises(RankDiverged, match=r"entry 1 cannot be applied: KeyError\(3\)"):
        reader.apply(writer.append([op], None, cache.digest()))


def test_the_writer_refuses_acks_that_do_not_fit() -> None:
    for ack, message in [
        (rank_pb2.Ack(index=2, digest=5), "rank 1 acked entry 2 after 0"),
        (rank_pb2.Ack(index=1, digest=6), "rank 1 has digest 0000000000000006 at entry 1"),
    ]:
        writer = LogWriter(1, 2)
        writer.append([], None, 5)
        shown: list[rank_pb2.Ack] = []
        writer.hold(1, shown.append)
        writer.ack(2, rank_pb2.Ack(index=1, digest=5))
        with pytest.raises(RankDiverged, match=message):
            writer.ack(1, ack)
        assert not shown
    with pytest.raises(RankDiverged, match="never sent"):
        writer.ack(2, rank_pb2.Ack(index=2, digest=5))


def test_a_rank_too_far_behind_is_an_error_not_a_growing_queue() -> None:
    writer = LogWriter(1, 1)
    with pytest.raises(RankDiverged, match="rank 1 is 1024 entries behind"):
        for _ in range(1025):
            writer.append([], None, 0)


def test_the_cost_of_an_entry_is_that_of_its_new_tokens(group: GroupEngine) -> None:
    group.generate("s", prompt(1, 900))
    sizes: list[int] = []
    send = group.leader._replication.send
    assert send is not None
    group.leader._replication.send = lambda entry: (sizes.append(entry.ByteSize()), send(entry))[1]
    history = list(group.cache.slots["s"].tokens)
    group.generate("s", history + new_tokens(prompt(3, 4)).tolist(), SHORT)
    assert max(sizes) < 500, "not a message of 900 tokens"
