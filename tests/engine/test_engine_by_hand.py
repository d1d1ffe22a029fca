"""The engine against examples worked out by hand, queueing theory, and the laws of its limits."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import attrs
import pytest

from pdflow.cost import LinearTime, StepCost, constant
from pdflow.engine import (
    Admitted,
    Dropped,
    Engine,
    Finished,
    Limits,
    NeverFitsError,
    Outcome,
    Phase,
    Prefilled,
    Sequence,
)
from pdflow.memory.paged import PagedPool

MS = 1_000_000
PER_TOKEN = StepCost(linear=LinearTime(slope_ps=10**9))
"""1 ms per token in a step, prefill or decode."""
TEN_MS = StepCost(h0=10**10)
"""10 ms per step, whatever is in it, and prompts may be cut."""

both = pytest.mark.parametrize("exact", [False, True])


def engine(cost: StepCost, blocks: int = 1000, exact: bool = False, **limits: int) -> Engine:
    return Engine(Limits(**limits), cost, PagedPool(blocks), exact=exact)


def run_until(engine: Engine, until: int, answer: Callable[[Outcome], None] | None = None) -> list[Outcome]:
    """Wake the engine whenever it asks to be, before `until`."""
    outcomes: list[Outcome] = []
    while (wake := engine.wake_at()) is not None and wake < until:
        for outcome in engine.advance(wake):
            outcomes.append(outcome)
            if answer is not None:
                answer(outcome)
    return outcomes


def all_loaded(engine: Engine, seqs: Iterable[Sequence]) -> list[Outcome]:
    """Admit sequences at instant 0, with their KV there at once, and run them to their ends."""
    for seq in seqs:
        engine.submit(seq, 0)
    run_until(engine, 1)
    for seq in seqs:
        engine.loaded(seq, 0)
    return run_until(engine, 10**12)


def summaries(outcomes: Iterable[Outcome]) -> list[tuple[str, int, int]]:
    return [(type(o).__name__, o.seq.index, o.at_ns // MS) for o in outcomes]


@both
def test_prompts_share_a_step_under_the_token_budget(exact: bool) -> None:
    p = engine(PER_TOKEN, exact=exact, max_num_seqs=8, max_num_batched_tokens=100)
    for index, prompt in enumerate((60, 70, 90)):
        p.submit(Sequence(index, prompt, prefill_only=True), 0)
    # Steps of 100, 100 and 20 tokens: 60 + 40, then 30 + 70, then the 20 that are left.
    assert summaries(run_until(p, 10**12)) == [("Prefilled", 0, 100), ("Prefilled", 1, 200), ("Prefilled", 2, 220)]


@both
def test_whole_prompts_are_never_chunked(exact: bool) -> None:
    p = engine(constant(0.1), exact=exact, max_num_seqs=8, max_num_batched_tokens=100)
    for index, prompt in enumerate((60, 40, 30, 5000, 10)):
        p.submit(Sequence(index, prompt, prefill_only=True), 0)
    # 60 + 40 fill the budget; 30 goes alone since 5000 does not fit beside it; 5000 goes alone, over the budget.
    assert summaries(run_until(p, 10**12)) == [
        ("Prefilled", 0, 100),
        ("Prefilled", 1, 100),
        ("Prefilled", 2, 200),
        ("Prefilled", 3, 300),
        ("Prefilled", 4, 400),
    ]


@both
def test_blocks_of_a_finished_prefill_stay_until_they_are_freed(exact: bool) -> None:
    p = engine(TEN_MS, blocks=4, exact=exact, max_num_seqs=2, block_size=16)
    first, second = Sequence(0, 64, prefill_only=True), Sequence(1, 1, prefill_only=True)
    p.submit(first, 0)
    p.submit(second, 0)
    assert summaries(run_until(p, 10**12)) == [("Prefilled", 0, 10)]
    assert (p.waiting, p.running, p.seats_taken, p.kv_blocks_used(20 * MS), p.wake_at()) == (1, 0, 0, 4, None)
    assert first.allocation is not None
    p.release(first.allocation, 50 * MS)
    assert summaries(run_until(p, 10**12)) == [("Prefilled", 1, 60)]
    assert second.start_ns == 50 * MS


@both
def test_a_remote_sequence_from_admission_to_its_last_token(exact: bool) -> None:
    d = engine(StepCost(c2=10**6), exact=exact, block_size=16)
    seq = Sequence(0, 32, 3, remote_kv=True)
    d.submit(seq, 5)
    assert run_until(d, 10**12) == [Admitted(seq, 5)]
    assert (d.loading, d.running, d.kv_blocks_used(6), d.wake_at()) == (1, 0, 2, None)
    d.loaded(seq, 1000)
    outcomes = run_until(d, 10**12)
    # Contexts 32, 33, 34 at 1 us each: the first step computes the last prompt token once more.
    assert outcomes == [Finished(seq, 1000 + (32 + 33 + 34) * 1000)]
    assert (seq.start_ns, seq.first_token_ns) == (1000, 33_000)
    assert seq.token_runs == [(0, 2)]
    assert d.pool.free == d.pool.num_blocks


@both
def test_who_stood_still_wakes_up_with_the_first_step_and_no_other(exact: bool) -> None:
    d = engine(StepCost(h0=10**9, hw=5 * 10**9), exact=exact)
    first, second = Sequence(0, 16, 4, remote_kv=True), Sequence(1, 16, 2, remote_kv=True)
    for seq in (first, second):
        d.submit(seq, 0)
    run_until(d, 1)
    d.loaded(first, 10 * MS)
    # 6 ms, then 1 each; idle from 19 ms on.
    assert summaries(run_until(d, 50 * MS)) == [("Finished", 0, 19)]
    assert first.first_token_ns == 16 * MS
    d.loaded(second, 50 * MS)
    assert summaries(run_until(d, 10**12)) == [("Finished", 1, 57)]
    assert d.busy_ps(60 * MS) == (9 + 7) * 10**9


@both
def test_an_arrival_joins_the_first_step_that_starts_strictly_later(exact: bool) -> None:
    d = engine(TEN_MS, exact=exact)
    first, at_boundary, before_boundary = (Sequence(i, 16, 10, remote_kv=True) for i in range(3))
    ready_at = {0: 0, 1: 20 * MS, 2: 20 * MS - 1}
    for seq in (first, at_boundary, before_boundary):
        d.submit(seq, 0)
    run_until(d, 1)
    d.loaded(first, 0)
    for seq in (before_boundary, at_boundary):
        run_until(d, ready_at[seq.index])
        d.loaded(seq, ready_at[seq.index])
    run_until(d, 10**12)
    assert [s.start_ns // MS for s in (first, before_boundary, at_boundary)] == [0, 20, 30]


@both
def test_decode_takes_a_block_when_the_context_crosses_into_it(exact: bool) -> None:
    d = engine(TEN_MS, blocks=3, exact=exact, block_size=4)
    seq = Sequence(0, 7, 6, remote_kv=True)
    d.submit(seq, 0)
    run_until(d, 1)
    d.loaded(seq, 0)
    used = []
    for step in range(6):
        run_until(d, step * 10 * MS + 5 * MS)
        used.append(d.kv_blocks_used(step * 10 * MS + 5 * MS))
    # Contexts 7, 8, 9, 10, 11, 12.
    assert used == [2, 2, 3, 3, 3, 3]
    assert summaries(run_until(d, 10**12)) == [("Finished", 0, 60)]


@both
def test_the_last_to_run_is_preempted_and_recomputes(exact: bool) -> None:
    d = engine(TEN_MS, blocks=4, exact=exact, block_size=4, max_num_batched_tokens=256)
    first, last = Sequence(0, 8, 5, remote_kv=True), Sequence(1, 7, 5, remote_kv=True)
    for seq in (first, last):
        d.submit(seq, 0)
    run_until(d, 1)
    for seq in (first, last):
        d.loaded(seq, 0)
    # Step 1 has contexts 8 and 7, step 2 needs a block for context 9: `last` goes after one token. It then needs two
    # blocks for 7 + 1 tokens, but three are held; they are free at 50 ms. The recomputation yields its second token,
    # the three others follow.
    assert summaries(run_until(d, 10**12)) == [("Finished", 0, 50), ("Finished", 1, 90)]
    assert (first.preemptions, last.preemptions, d.preemptions) == (0, 1, 1)
    assert last.token_runs == [(0, 0), (5, 8)]
    assert last.first_token_ns == 10 * MS
    assert d.pool.free == 4


@both
def test_a_local_sequence_prefills_then_decodes_alongside_others(exact: bool) -> None:
    e = engine(PER_TOKEN, exact=exact, max_num_seqs=4, max_num_batched_tokens=10)
    one, two = Sequence(0, 10, 3), Sequence(1, 12, 2)
    e.submit(one, 0)
    e.submit(two, 0)
    # 10 (one) | 1 + 9 | 1 + 3 (two's prompt is done) | 1
    assert summaries(run_until(e, 10**12)) == [("Finished", 0, 24), ("Finished", 1, 25)]
    assert (one.first_token_ns // MS, two.first_token_ns // MS) == (10, 24)


@both
def test_drop_in_every_phase(exact: bool) -> None:
    d = engine(TEN_MS, blocks=10, exact=exact, max_num_seqs=2, block_size=16)
    running, loading, waiting, ready = (Sequence(i, 16, 9, remote_kv=True) for i in range(4))
    d.submit(running, 0)
    d.submit(loading, 0)
    d.submit(waiting, 0)
    run_until(d, 1)
    d.loaded(running, 0)
    run_until(d, 15 * MS)
    assert [s.phase for s in (running, loading, waiting)] == [Phase.RUNNING, Phase.LOADING, Phase.WAITING]

    assert d.drop(waiting, 15 * MS) == Dropped.AT_ONCE
    assert d.drop(waiting, 15 * MS) == Dropped.NOT_HERE
    assert d.drop(loading, 15 * MS) == Dropped.BLOCKS_ARE_YOURS
    assert loading.allocation is not None
    assert d.kv_blocks_used(15 * MS) == 3  # 16 tokens each; the running one has begun its 17th
    d.pool.release(loading.allocation)

    assert d.drop(running, 15 * MS) == Dropped.AFTER_STEP
    assert d.drop(running, 15 * MS) == Dropped.NOT_HERE
    assert d.wake_at() == 20 * MS
    assert run_until(d, 10**12) == []
    assert (running.generated, d.pool.free, d.seats_taken, d.wake_at()) == (2, 10, 0, None)

    d.submit(ready, 30 * MS)
    run_until(d, 31 * MS)
    d.loaded(ready, 32 * MS)
    assert d.drop(ready, 32 * MS) == Dropped.AT_ONCE
    assert d.advance(32 * MS) == []
    assert (d.pool.free, d.seats_taken, d.wake_at()) == (10, 0, None)
    with pytest.raises(ValueError, match="not LOADING"):
        d.loaded(ready, 33 * MS)


def test_what_cannot_change_the_batch_does_not_end_the_segment() -> None:
    d = engine(TEN_MS, max_num_seqs=1)
    seq = Sequence(0, 16, 100, remote_kv=True)
    d.submit(seq, 0)
    run_until(d, 1)
    d.loaded(seq, 0)
    d.advance(0)
    assert d.wake_at() == 1000 * MS
    d.submit(Sequence(1, 16, 100, remote_kv=True), 25 * MS)
    given = d.pool.allocate(3)
    assert given is not None
    d.release(given, 26 * MS)
    assert d.wake_at() == 1000 * MS
    assert d.next_boundary(30 * MS) == 40 * MS
    assert d.next_boundary(30 * MS - 1) == 30 * MS
    assert d.wake_at() == 1000 * MS
    assert d.busy_ps(33 * MS) == 33 * MS * 1000


def test_queue_is_first_come_first_served() -> None:
    d = engine(TEN_MS, blocks=10, block_size=1)
    big, huge, small = (Sequence(i, n, 1, remote_kv=True) for i, n in enumerate((8, 10, 1)))
    for seq in (big, huge, small):
        d.submit(seq, 0)
    # The small one would fit beside the big one, but never overtakes.
    assert summaries(run_until(d, 1)) == [("Admitted", 0, 0)]
    d.loaded(big, 0)
    assert summaries(run_until(d, 10**12)) == [("Finished", 0, 10), ("Admitted", 1, 10)]


def test_what_never_fits_is_refused() -> None:
    d = engine(TEN_MS, blocks=4, block_size=16)
    d.submit(Sequence(0, 60, 5, remote_kv=True), 0)
    with pytest.raises(NeverFitsError, match=r"needs 5 KV blocks for 65 tokens, the engine has 4 of 16"):
        d.submit(Sequence(1, 60, 6, remote_kv=True), 0)
    d.submit(Sequence(2, 64, 500, prefill_only=True), 0)
    assert d.waiting == 2


def test_limits_are_checked() -> None:
    with pytest.raises(ValueError, match="at least max_num_seqs"):
        Limits(max_num_seqs=100, max_num_batched_tokens=99)
    with pytest.raises(ValueError, match="max_num_seqs"):
        Limits(max_num_seqs=0)


@both
def test_nothing_takes_time(exact: bool) -> None:
    d = engine(constant(0, 0), exact=exact)
    seq = Sequence(0, 100, 50, remote_kv=True)
    d.submit(seq, 7)
    run_until(d, 8)
    d.loaded(seq, 9)
    assert run_until(d, 10) == [Finished(seq, 9)]
    local = Sequence(1, 100, 50)
    d.submit(local, 11)
    assert run_until(d, 12) == [Finished(local, 11)]
    assert local.first_token_ns == 11


def test_md1_is_lindleys_recursion() -> None:
    """One seat, constant service, Poisson arrivals: departure = max(arrival, previous departure) + service."""
    arrivals, at = [], 0
    source = random.Random(1)
    for _ in range(2000):
        at += round(source.expovariate(8.0) * 1e9)
        arrivals.append(at)
    p = engine(constant(0.1), blocks=10**6, max_num_seqs=1)
    done: list[int] = []
    answer = [lambda o: done.append(o.at_ns)][0]
    for index, arrival in enumerate(arrivals):
        run_until(p, arrival, answer)
        p.submit(Sequence(index, 512, prefill_only=True), arrival)
    outcomes = run_until(p, 10**15, answer)
    assert all(isinstance(o, Prefilled) for o in outcomes)
    departure, expected = 0, []
    for arrival in arrivals:
        departure = max(arrival, departure) + 100 * MS
        expected.append(departure)
    assert done == expected
    assert p.busy_ps(done[-1]) == 2000 * 10**11


@pytest.mark.parametrize("seed", range(3))
def test_no_step_exceeds_the_token_budget(seed: int) -> None:
    """With 1 ms per token, a step's length is its number of tokens."""

    class Longest:
        tokens = 0

        def add(self, start: int, first: int, delta: int, steps: int, weight: int) -> None:
            assert delta == 0
            self.tokens = max(self.tokens, first // 10**9)

    source = random.Random(seed)
    log = Longest()
    e = Engine(Limits(max_num_seqs=20, max_num_batched_tokens=50), PER_TOKEN, PagedPool(60), log=log)
    for index in range(200):
        e.submit(Sequence(index, source.randint(1, 200), source.randint(1, 40)), 0)
    assert len(run_until(e, 10**15)) == 200
    assert log.tokens == 50
    assert e.pool.free == 60


def test_cost_is_asked_with_lengths_in_exact_mode_only() -> None:
    """The exact door shares no closed form: a cost that has none of them still runs there."""

    @attrs.frozen
    class StepCostOnly:
        chunks: bool = True
        hw: int = 0

        def step_ps(self, prefill: list[tuple[int, int]], decode_contexts: list[int]) -> int:
            return 1000 * (sum(n for n, _ in prefill) + sum(decode_contexts))

    e = Engine(Limits(), StepCostOnly(), PagedPool(100), exact=True)  # type: ignore[arg-type]
    e.submit(Sequence(0, 10, 3), 0)
    assert [o.at_ns for o in run_until(e, 10**9)] == [10 + 11 + 12]


@both
def test_async_scheduling_notices_an_arrival_a_step_later(exact: bool) -> None:
    d = engine(TEN_MS, exact=exact, async_scheduling=True)
    first, second = Sequence(0, 1, 9), Sequence(1, 1, 1)
    d.submit(first, 0)
    run_until(d, 15 * MS)
    # The step of 20 ms is composed at 10 ms, when the one before it starts.
    d.submit(second, 15 * MS)
    run_until(d, 10**12)
    assert (second.start_ns, second.first_token_ns) == (30 * MS, 40 * MS)


@both
def test_async_scheduling_has_nothing_to_compose_ahead_for_an_engine_that_runs_out(exact: bool) -> None:
    p = engine(TEN_MS, exact=exact, async_scheduling=True)
    first, second = Sequence(0, 1, prefill_only=True), Sequence(1, 1, prefill_only=True)
    p.submit(first, 0)
    run_until(p, 5 * MS)
    p.submit(second, 5 * MS)
    run_until(p, 10**12)
    assert second.start_ns == 10 * MS


@both
def test_async_scheduling_gives_a_seat_away_a_step_after_it_is_free(exact: bool) -> None:
    d = engine(TEN_MS, exact=exact, async_scheduling=True, max_num_seqs=2)
    long, short, waits = Sequence(0, 1, 9), Sequence(1, 1, 2), Sequence(2, 1, 1)
    for seq in (long, short, waits):
        d.submit(seq, 0)
    finished = {outcome.seq.index: outcome.at_ns // MS for outcome in run_until(d, 10**12)}
    # The second one's last token comes with the step that ends at 20 ms; the next step was composed at 10 ms.
    assert finished == {0: 90, 1: 20, 2: 40}
    assert waits.start_ns == 30 * MS


@both
def test_async_scheduling_gives_blocks_away_a_step_after_they_are_free(exact: bool) -> None:
    d = engine(TEN_MS, blocks=4, exact=exact, async_scheduling=True, block_size=16)
    long, short, waits = Sequence(0, 1, 9), Sequence(1, 17, 2), Sequence(2, 17, 1)
    for seq in (long, short, waits):
        d.submit(seq, 0)
    run_until(d, 10**12)
    assert waits.start_ns == 30 * MS


@both
def test_replicas_take_sequences_in_turn_and_wait_for_the_slowest(exact: bool) -> None:
    """Two replicas. Of three sequences the first has the first and the third, so that a step reads both contexts."""
    cost = StepCost(c2=10**9)
    d = engine(cost, exact=exact, max_num_seqs=8, replicas=2)
    seqs = [Sequence(index, prompt, 3, remote_kv=True) for index, prompt in enumerate((10, 25, 5))]
    outcomes = all_loaded(d, seqs)
    assert [seq.replica for seq in seqs] == [0, 1, 0]
    # The second replica's context is the larger one until both of the first have grown past it: never, in 3 steps.
    assert {o.at_ns // MS for o in outcomes} == {25 + 26 + 27}


@both
def test_a_replica_with_more_sequences_becomes_the_slowest(exact: bool) -> None:
    """Contexts of 2 x 10 grow by 2 a step, one of 22 by 1: from the third step on the first replica takes longer."""
    d = engine(StepCost(c2=10**9), exact=exact, max_num_seqs=8, replicas=2)
    seqs = [Sequence(index, prompt, 6, remote_kv=True) for index, prompt in enumerate((10, 22, 10))]
    outcomes = all_loaded(d, seqs)
    steps = [max(20 + 2 * step, 22 + step) for step in range(6)]
    assert steps == [22, 23, 24, 26, 28, 30]
    assert {o.at_ns // MS for o in outcomes} == {sum(steps)}


@both
def test_a_replica_computes_its_share_of_the_budget_of_one_prompt(exact: bool) -> None:
    """200 tokens a step, 100 of each replica: a prompt of 150 needs two steps, the first with another one."""
    p = engine(PER_TOKEN, exact=exact, max_num_seqs=8, max_num_batched_tokens=200, replicas=2)
    for index, prompt in enumerate((150, 80)):
        p.submit(Sequence(index, prompt, prefill_only=True), 0)
    assert summaries(run_until(p, 10**12)) == [("Prefilled", 1, 100), ("Prefilled", 0, 150)]


def test_a_sequence_must_fit_a_replica() -> None:
    d = engine(TEN_MS, blocks=10, block_size=16, replicas=2)
    d.submit(Sequence(0, 80, 1), 0)
    with pytest.raises(NeverFitsError):
        d.submit(Sequence(1, 81, 1), 0)
