"""What an engine makes of prompts that begin alike, worked out by hand. A prefix block is 8 tokens here."""

from __future__ import annotations

from pdflow.cost import StepCost
from pdflow.engine import Engine, Limits, Sequence
from pdflow.memory.caching import CachingPool
from tests.engine.test_engine_by_hand import MS, PER_TOKEN, TEN_MS, both, run_until, summaries

ABC = (1, 2, 3)


def engine(cost: StepCost, blocks: int = 1000, exact: bool = False, **limits: int) -> Engine:
    return Engine(Limits(block_size=4, **limits), cost, CachingPool(blocks, span=2), exact=exact)


@both
def test_a_prompt_is_computed_from_where_it_differs(exact: bool) -> None:
    p = engine(PER_TOKEN, exact=exact)
    for at, prompt, prefix in ((0, 30, ABC), (100, 30, (1, 2, 4)), (200, 30, ()), (300, 30, (5, 2, 3))):
        p.submit(Sequence(at, prompt, prefill_only=True, prefix=prefix), at * MS)
        run_until(p, (at + 99) * MS)
    p.submit(Sequence(400, 24, prefill_only=True, prefix=ABC), 400 * MS)
    # The last token is computed in any case, and with it the prefix block that it is in.
    assert summaries(run_until(p, 10**12)) == [("Prefilled", 400, 408)]
    assert (p.prefix_cache_queries, p.prefix_cache_hits) == (144, 32)
    assert p.busy_ps(10**12) == (30 + 14 + 30 + 30 + 8) * 10**9


@both
def test_prompts_of_one_step_find_each_other(exact: bool) -> None:
    p = engine(PER_TOKEN, exact=exact, max_num_seqs=8, max_num_batched_tokens=20)
    for index in range(3):
        p.submit(Sequence(index, 26, prefill_only=True, prefix=ABC), 0)
    # 20 tokens of the first; its other 6 with the 2 that are left of each of the rest.
    assert summaries(run_until(p, 10**12)) == [("Prefilled", index, 30) for index in range(3)]


@both
def test_shared_blocks_are_taken_once(exact: bool) -> None:
    p = engine(TEN_MS, blocks=9, exact=exact)
    first, second = (Sequence(i, 26, prefill_only=True, prefix=ABC) for i in range(2))
    third = Sequence(2, 5, prefill_only=True)
    for seq in (first, second, third):
        p.submit(seq, 0)
    # Seven blocks and one; the third needs two.
    assert summaries(run_until(p, 10**12)) == [("Prefilled", 0, 10), ("Prefilled", 1, 10)]
    assert p.kv_blocks_used(20 * MS) == 8
    assert first.allocation is not None
    assert second.allocation is not None
    p.release(first.allocation, 20 * MS)
    assert p.kv_blocks_used(20 * MS) == 7
    assert summaries(run_until(p, 10**12)) == [("Prefilled", 2, 30)]


@both
def test_what_is_needed_is_forgotten(exact: bool) -> None:
    p = engine(PER_TOKEN, blocks=8, exact=exact)
    took = []
    for index, prefix in enumerate((ABC, (4, 5, 6), ABC)):
        seq = Sequence(index, 26, prefill_only=True, prefix=prefix)
        p.submit(seq, index * 100 * MS)
        [(_, _, at)] = summaries(run_until(p, 10**12))
        took.append(at - index * 100)
        assert seq.allocation is not None
        p.release(seq.allocation, at * MS)
        assert p.pool.free == 8
    assert took == [26, 26, 26]
    assert p.prefix_cache_hits == 0


@both
def test_the_preempted_find_their_own_prompt(exact: bool) -> None:
    e = engine(PER_TOKEN, blocks=8, exact=exact, max_num_seqs=2)
    first, second = Sequence(0, 8, 15, prefix=(1,)), Sequence(1, 16, 9, prefix=(2, 3))
    for seq in (first, second):
        e.submit(seq, 0)
    run_until(e, 10**12)
    # With 8 blocks both reach contexts 12 and 20. Then the second goes, and leaves five blocks, four of them of use.
    # The first takes three of the five for its contexts up to 22: the one of no use, and the prompt's end.
    assert (first.preemptions, second.preemptions) == (0, 1)
    assert second.cached_tokens == 8
    assert e.prefix_cache_queries == 24
    assert e.pool.free == 8


@both
def test_what_comes_back_later_saves_nothing_from_a_step_begun_before(exact: bool) -> None:
    """However many steps are planned at once: the pool hears of their blocks when the segment ends, or here."""
    e = engine(TEN_MS, blocks=8, exact=exact)
    known, other = Sequence(0, 9, prefill_only=True, prefix=(1,)), Sequence(1, 12, prefill_only=True)
    e.submit(known, 0)
    run_until(e, 20 * MS)
    assert known.allocation is not None
    e.release(known.allocation, 20 * MS)
    e.submit(other, 20 * MS)
    run_until(e, 30 * MS + 1)
    e.submit(Sequence(2, 4, 20), 30 * MS)
    # It takes its fourth block, which is not to be had but from what is remembered, for the context of 13, at 120 ms.
    run_until(e, 125 * MS)
    assert other.allocation is not None
    e.release(other.allocation, 125 * MS)
    late = Sequence(3, 9, prefill_only=True, prefix=(1,))
    run_until(e, 135 * MS)
    e.submit(late, 135 * MS)
    run_until(e, 10**12)
    assert late.admitted_ns == 140 * MS
    assert late.cached_tokens == 0
