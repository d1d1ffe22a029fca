"""A step that computes each layer when its KV has landed: the rule, and the engine whose step ends by it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdflow.cost import StepCost
from pdflow.engine import Admitted, Dropped, Engine, Finished, Limits, Sequence
from pdflow.engine.hosted import HostedEngine
from pdflow.engine.layered import LayeredLoad
from pdflow.memory.paged import PagedPool

MS = 1_000_000
PS = 1000
TEN_MS = StepCost(h0=10**10)
"""10 ms per step, whatever is in it."""


def landed(*at: int) -> LayeredLoad:
    load = LayeredLoad(len(at))
    load.begin(1)
    for layer, now in enumerate(at):
        load.copied(layer, now)
    return load


def test_copies_that_are_faster_than_layers_delay_a_step_by_the_first() -> None:
    assert landed(1, 2, 3, 4).end_ps(0, 40 * PS) == 41 * PS


def test_copies_that_are_slower_than_layers_delay_a_step_until_the_last_layer_is_computed() -> None:
    assert landed(20, 40, 60, 80).end_ps(0, 40 * PS) == 90 * PS


def test_a_step_is_no_shorter_for_layers_that_landed_before_it_began() -> None:
    assert landed(1, 2, 3, 4).end_ps(7 * PS, 40 * PS) == 47 * PS


def test_one_late_layer_delays_those_behind_it_alone() -> None:
    assert landed(0, 0, 35, 35).end_ps(0, 40 * PS) == 55 * PS


@given(st.lists(st.integers(0, 100), min_size=1, max_size=8), st.integers(0, 100), st.integers(0, 100))
def test_a_step_ends_as_a_loop_over_its_layers_does(gaps: list[int], begun: int, share: int) -> None:
    at = [sum(gaps[: layer + 1]) for layer in range(len(gaps))]
    now = begun
    for ready in at:
        now = max(now, ready) + share
    assert landed(*at).end_ps(begun * PS, share * len(at) * PS) == now * PS


def test_a_layer_is_computed_when_all_copies_of_it_have_landed() -> None:
    load = LayeredLoad(2)
    assert load.may_compute(0)
    load.begin(1)
    load.begin(1)
    load.copied(0, 1)
    assert not load.may_compute(0)
    load.copied(0, 2)
    assert load.may_compute(0)
    assert not load.may_compute(1)
    assert not load.complete
    with pytest.raises(ValueError, match="still waits"):
        load.end_ps(0, 10)
    with pytest.raises(ValueError, match="no copy of layer 0"):
        load.copied(0, 3)


def in_step(index: int, output: int = 2) -> Sequence:
    return Sequence(index, 16, output, remote_kv=True, loads_in_step=True)


def hosted(exact: bool) -> HostedEngine:
    return HostedEngine(Limits(), TEN_MS, PagedPool(100), exact)


@pytest.mark.parametrize("exact", [False, True])
def test_a_sequence_decodes_in_the_step_that_admits_it(exact: bool) -> None:
    """Two layers land 4 and 8 ms after the step of 10 ms began, which ends at 4 + 10."""
    engine, seq = hosted(exact), in_step(0)
    engine.submit(seq, 0)
    assert engine.advance(0) == [Admitted(seq, 0)]
    assert engine.wake_at() is None
    assert engine.awaits(seq)
    engine.wait_no_more(seq, 8 * MS, landed(4 * MS, 8 * MS))
    assert engine.wake_at() == 14 * MS
    assert engine.advance(14 * MS) == []
    assert seq.first_token_ns == 14 * MS
    assert engine.advance(24 * MS) == [Finished(seq, 24 * MS)]


@pytest.mark.parametrize("exact", [False, True])
def test_a_step_waits_for_all_sequences_that_it_admits(exact: bool) -> None:
    engine, seqs = hosted(exact), [in_step(0), in_step(1)]
    for seq in seqs:
        engine.submit(seq, 0)
    engine.advance(0)
    engine.wait_no_more(seqs[0], 1 * MS, None)
    assert engine.wake_at() is None
    engine.wait_no_more(seqs[1], 30 * MS, landed(20 * MS, 30 * MS))
    assert engine.wake_at() == 35 * MS


@pytest.mark.parametrize("exact", [False, True])
def test_decodes_beside_it_wait_in_the_same_step(exact: bool) -> None:
    engine, old, new = hosted(exact), in_step(0, output=9), in_step(1)
    engine.submit(old, 0)
    engine.advance(0)
    engine.wait_no_more(old, 0, landed(0))
    engine.advance(10 * MS)
    engine.submit(new, 15 * MS)
    wake = engine.wake_at()
    assert wake == 20 * MS
    assert engine.advance(wake) == [Admitted(new, 20 * MS)]
    engine.wait_no_more(new, 50 * MS, landed(50 * MS))
    assert engine.wake_at() == 60 * MS
    engine.advance(60 * MS)
    assert new.first_token_ns == 60 * MS
    assert engine.wake_at() == 70 * MS


@pytest.mark.parametrize("exact", [False, True])
def test_a_sequence_that_is_dropped_keeps_its_blocks_until_the_step_is_over(exact: bool) -> None:
    engine, seq = hosted(exact), in_step(0)
    engine.submit(seq, 0)
    engine.advance(0)
    assert engine.drop(seq, 1 * MS) is Dropped.AFTER_STEP
    assert engine.pool.free == 99
    engine.wait_no_more(seq, 2 * MS, landed(2 * MS))
    assert engine.advance(12 * MS) == []
    assert engine.pool.free == 100


@pytest.mark.parametrize("exact", [False, True])
def test_a_host_that_waits_for_something_else_delays_the_step_too(exact: bool) -> None:
    engine, seq = hosted(exact), in_step(0)
    engine.submit(seq, 0)
    engine.advance(0)
    engine.stretch(1 * MS, 40 * MS)
    assert engine.wake_at() is None
    engine.wait_no_more(seq, 2 * MS, landed(2 * MS))
    assert engine.wake_at() == 40 * MS


@pytest.mark.parametrize("exact", [False, True])
def test_layers_that_land_in_a_frozen_step_are_computed_when_it_goes_on(exact: bool) -> None:
    engine, seq = hosted(exact), in_step(0)
    engine.submit(seq, 0)
    engine.advance(0)
    engine.freeze(0)
    engine.wait_no_more(seq, 8 * MS, landed(4 * MS, 8 * MS))
    assert engine.wake_at() is None
    engine.thaw(20 * MS)
    assert engine.wake_at() == 30 * MS


def test_an_engine_without_a_host_refuses_such_sequences() -> None:
    engine, seq = Engine(Limits(), TEN_MS, PagedPool(100)), in_step(0)
    engine.submit(seq, 0)
    with pytest.raises(TypeError, match="HostedEngine"):
        engine.advance(0)
