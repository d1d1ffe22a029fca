"""vLLM V0's order, worked out by hand: a step of prompts or a step of decodes, prompts first, each as a whole."""

from __future__ import annotations

import attrs
import pytest

from pdflow.cost import LinearTime, StepCost
from pdflow.engine import Admitted, Engine, Finished, Limits, Outcome, Sequence
from pdflow.engine.hosted import HostedEngine
from pdflow.engine.log import StepLog
from pdflow.memory.paged import PagedPool

MS = 1_000_000
PER_TOKEN = StepCost(linear=LinearTime(slope_ps=10**9))
"""1 ms per token in a step, prefill or decode."""
V0 = Limits(prompts_first=True, max_num_batched_tokens=300)

both = pytest.mark.parametrize("exact", [False, True])


@attrs.define
class Rows:
    """Rows of a step log."""

    rows: list[tuple[int, int, int, int, int]] = attrs.field(factory=list)

    def add(self, start_ps: int, first_step_ps: int, delta_ps: int, steps: int, itl_weight: int, /) -> None:
        self.rows.append((start_ps // 10**9, first_step_ps // 10**9, delta_ps // 10**9, steps, itl_weight))


def engine(exact: bool, limits: Limits = V0, log: StepLog | None = None, stalls: StepLog | None = None) -> Engine:
    return Engine(limits, PER_TOKEN, PagedPool(1000), exact, log, stalls)


def run(engine: Engine, until_ms: int = 10**6) -> list[Outcome]:
    outcomes: list[Outcome] = []
    while (wake := engine.wake_at()) is not None and wake < until_ms * MS:
        outcomes += engine.advance(wake)
    return outcomes


@both
def test_a_prompt_stops_the_decodes_until_it_is_computed(exact: bool) -> None:
    """The first decodes at 10 ms, 1 ms each; a prompt of 100 tokens comes at 12.5 ms, and it has its tokens 13 ms and
    114 ms after the start, and no step has both."""
    log, stalls = Rows(), Rows()
    these = engine(exact, log=log, stalls=stalls)
    first, second = Sequence(0, 10, 6), Sequence(1, 100, 2)
    these.submit(first, 0)
    run(these, 12)
    these.submit(second, 12 * MS + MS // 2)
    assert run(these) == [Finished(second, 115 * MS), Finished(first, 116 * MS)]
    assert (first.first_token_ns, second.first_token_ns) == (10 * MS, 113 * MS)
    assert first.token_runs == [(0, 3), (5, 6)]
    assert second.token_runs == [(4, 5)]
    steps = [(start + nth * time, time, weight) for start, time, _, count, weight in log.rows for nth in range(count)]
    # A sequence's first wait after a step of prompts is in the other log.
    assert steps == [(0, 10, 0), (10, 1, 0), (11, 1, 1), (12, 1, 1), (13, 100, 0), (113, 2, 0), (115, 1, 1)]
    assert stalls.rows == [(10, 1, 0, 1, 1), (13, 102, 0, 1, 1), (113, 2, 0, 1, 1)]


@both
def test_prompts_that_fit_together_share_a_step_and_the_others_come_before_any_decode(exact: bool) -> None:
    """Of three prompts of 150 tokens, the budget of 300 takes two."""
    these, seqs = engine(exact), [Sequence(index, 150, 2) for index in range(3)]
    for seq in seqs:
        these.submit(seq, 0)
    assert run(these) == [Finished(seq, 453 * MS) for seq in seqs]
    assert [seq.first_token_ns for seq in seqs] == [300 * MS, 300 * MS, 450 * MS]


@both
def test_a_prompt_above_the_budget_is_not_cut(exact: bool) -> None:
    these, seq = engine(exact), Sequence(0, 500, 1)
    these.submit(seq, 0)
    assert run(these) == [Finished(seq, 500 * MS)]


@both
def test_decodes_go_on_while_a_prompt_has_no_seat(exact: bool) -> None:
    these = engine(exact, attrs.evolve(V0, max_num_seqs=1))
    first, second = Sequence(0, 10, 3), Sequence(1, 10, 1)
    these.submit(first, 0)
    these.submit(second, 1 * MS)
    assert run(these) == [Finished(first, 12 * MS), Finished(second, 22 * MS)]


@both
def test_a_remote_prompts_last_token_is_computed_in_a_step_of_prompts(exact: bool) -> None:
    """Its KV arrives at 20.5 ms; the decode of the first stops for the step of 1 ms that follows."""
    these, first, remote = engine(exact), Sequence(0, 10, 20), Sequence(1, 50, 2, remote_kv=True)
    these.submit(first, 0)
    these.submit(remote, 1 * MS)
    run(these, 20)
    these.loaded(remote, 20 * MS + MS // 2)
    run(these)
    assert remote.first_token_ns == 22 * MS
    assert remote.finished_ns == 24 * MS
    assert first.token_runs == [(0, 11), (13, 20)]


@both
def test_an_engine_that_stands_for_loads_decodes_nothing_before_the_queue_is_empty(exact: bool) -> None:
    """Two remote prompts, one after the other because only one seat is left, as in V0's pipe: each load holds the
    engine for 50 ms, and the sequence that decodes waits for both."""
    limits = attrs.evolve(V0, stands_for_loads=True)
    these = HostedEngine(limits, PER_TOKEN, PagedPool(1000), exact)
    first, *remote = Sequence(0, 10, 3), *(Sequence(index, 50, 1, remote_kv=True) for index in (1, 2))
    these.submit(first, 0)
    these.submit(remote[0], 5 * MS)
    assert run(these, 11) == [Admitted(remote[0], 10 * MS)]
    assert these.wake_at() is None
    these.freeze(10 * MS)
    these.submit(remote[1], 30 * MS)
    these.loaded(remote[0], 60 * MS)
    these.thaw(60 * MS)
    assert run(these, 62) == [Finished(remote[0], 61 * MS), Admitted(remote[1], 61 * MS)]
    these.freeze(61 * MS)
    these.loaded(remote[1], 111 * MS)
    these.thaw(111 * MS)
    assert run(these) == [Finished(remote[1], 112 * MS), Finished(first, 114 * MS)]


@both
def test_decodes_go_on_if_what_they_stood_for_is_dropped(exact: bool) -> None:
    limits = attrs.evolve(V0, stands_for_loads=True)
    these, first, remote = engine(exact, limits), Sequence(0, 10, 3), Sequence(1, 50, 1, remote_kv=True)
    these.submit(first, 0)
    these.submit(remote, 5 * MS)
    run(these, 11)
    these.drop(remote, 40 * MS)
    assert remote.allocation is not None
    these.release(remote.allocation, 41 * MS)
    assert run(these) == [Finished(first, 42 * MS)]


@pytest.mark.parametrize("later", [{"async_scheduling": True}, {"replicas": 2}])
def test_v0_has_nothing_that_came_later(later: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="vLLM V0"):
        Limits(prompts_first=True, **later)  # type: ignore[arg-type]
