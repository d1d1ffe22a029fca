"""Sessions as they are drawn: what every turn says, and that it depends on nothing but the seed."""

from __future__ import annotations

from itertools import islice, pairwise
from statistics import fmean

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from pdflow.scenario.schema.distributions import (
    EmpiricalTurns,
    ExponentialTime,
    FixedLength,
    FixedTime,
    FixedTurns,
    GeometricTurns,
    LognormalTime,
    Time,
    Turns,
    UniformLength,
    UniformTime,
    UniformTurns,
)
from pdflow.scenario.schema.workload import Client, ClosedArrival, PoissonArrival, Sessions, Workload
from pdflow.workload import draws
from pdflow.workload.request import NEVER, SESSION_BLOCK_TOKENS, WHEN_ONE_ENDS
from pdflow.workload.rng import Rng
from pdflow.workload.sessions import Session, sessions

SECOND = 1_000_000_000
CHAT = Workload(
    requests=100,
    arrival=PoissonArrival(rate_rps=2.0),
    input_tokens=UniformLength(low=10, high=700),
    output_tokens=UniformLength(low=1, high=900),
    sessions=Sessions(
        turns=UniformTurns(low=1, high=6),
        think_s=ExponentialTime(mean_s=5.0),
        new_tokens=UniformLength(low=1, high=300),
        system_prompt_tokens=1100,
    ),
)


def drawn(workload: Workload = CHAT, count: int = 40, seed: int = 3) -> list[Session]:
    return list(islice(sessions(workload, seed), count))


def token_counts(session: Session) -> list[tuple[int, int]]:
    return [(turn.input_tokens, turn.output_tokens) for turn in session.turns]


@given(
    seed=st.integers(0, 99),
    system=st.integers(0, 2000),
    turns=st.integers(1, 8),
    limit=st.none() | st.integers(4000, 9000),
)
def test_every_prompt_is_the_conversation_and_something_new(
    seed: int, system: int, turns: int, limit: int | None
) -> None:
    assert CHAT.sessions is not None
    config = evolve(CHAT.sessions, turns=FixedTurns(turns=turns), system_prompt_tokens=system, max_context_tokens=limit)
    seen: set[int] = set()
    for session in drawn(evolve(CHAT, sessions=config), 6, seed):
        assert 1 <= len(session.turns) <= turns
        assert len(session.think_ns) == len(session.turns)
        first = session.turns[0]
        assert system + 10 <= first.input_tokens <= system + 700
        for before, after in pairwise(session.turns):
            assert 1 <= after.input_tokens - before.input_tokens - before.output_tokens <= 300
            assert after.prefix[: len(before.prefix)] == before.prefix
        for turn in session.turns:
            assert limit is None or turn.input_tokens + turn.output_tokens <= limit
            assert len(turn.prefix) == (turn.input_tokens + turn.output_tokens) // SESSION_BLOCK_TOKENS
        common = system // SESSION_BLOCK_TOKENS
        names = session.turns[-1].prefix
        assert names[:common] == tuple(range(common))
        assert seen.isdisjoint(names[common:])
        assert len(set(names)) == len(names)
        seen |= set(names[common:])


def test_a_limit_of_the_context_only_shortens_sessions() -> None:
    assert CHAT.sessions is not None
    shortened = drawn(evolve(CHAT, sessions=evolve(CHAT.sessions, max_context_tokens=3500)))
    whole = drawn()
    assert all(
        token_counts(some) == token_counts(all_)[: len(some.turns)] for some, all_ in zip(shortened, whole, strict=True)
    )
    assert sum(len(session.turns) for session in shortened) < sum(len(session.turns) for session in whole)


def test_arrival_times_do_not_change_the_content_of_sessions() -> None:
    closed = drawn(evolve(CHAT, arrival=ClosedArrival(concurrency=3)))
    assert [(token_counts(session), session.think_ns) for session in closed] == [
        (token_counts(session), session.think_ns) for session in drawn()
    ]
    assert [session.begins_ns for session in closed[:5]] == [0, 0, 0, WHEN_ONE_ENDS, WHEN_ONE_ENDS]
    assert drawn() == drawn()
    assert drawn() != drawn(seed=4)


def test_a_larger_share_of_cancels_sends_more_clients_away_and_moves_none() -> None:
    def leaving(share: float) -> list[int]:
        client = Client(cancel_probability=share, cancel_after_s=UniformTime(low_s=1.0, high_s=2.0))
        return [turn.leaves_ns for session in drawn(evolve(CHAT, client=client)) for turn in session.turns]

    few, many = leaving(0.1), leaving(0.6)
    assert all(one in (NEVER, other) for one, other in zip(few, many, strict=True))
    assert 0 < len(few) - few.count(NEVER) < len(many) - many.count(NEVER) < len(many)
    assert all(SECOND <= at <= 2 * SECOND for at in many if at != NEVER)
    assert leaving(1.0).count(NEVER) == 0


@pytest.mark.parametrize(
    ("distribution", "low", "high", "mean"),
    [
        (FixedTurns(turns=4), 4, 4, 4.0),
        (UniformTurns(low=2, high=6), 2, 6, 4.0),
        (GeometricTurns(mean=4.0, high=1000), 1, 1000, 4.0),
        (GeometricTurns(mean=1.0, high=9), 1, 1, 1.0),
        (GeometricTurns(mean=50.0, high=3), 1, 3, 2.94),
        (EmpiricalTurns(turns=(1, 10), weights=(2.0, 1.0)), 1, 10, 4.0),
    ],
)
def test_turns(distribution: Turns, low: int, high: int, mean: float) -> None:
    draw = draws.turns(distribution, Rng(1).stream("turns"))
    numbers = [draw() for _ in range(5000)]
    assert low <= min(numbers) <= max(numbers) <= high == distribution.high or distribution == GeometricTurns(
        mean=1.0, high=9
    )
    assert fmean(numbers) == pytest.approx(mean, rel=0.05)


@pytest.mark.parametrize(
    ("distribution", "low_s", "high_s", "mean_s"),
    [
        (FixedTime(time_s=0.25), 0.25, 0.25, 0.25),
        (UniformTime(low_s=1.0, high_s=3.0), 1.0, 3.0, 2.0),
        (ExponentialTime(mean_s=2.0), 0.0, 80.0, 2.0),
        (LognormalTime(median_s=2.0, sigma=0.5, low_s=1.0, high_s=10.0), 1.0, 10.0, 2.28),
        (LognormalTime(median_s=2.0, sigma=1000.0, high_s=10.0), 0.0, 10.0, 5.0),
    ],
)
def test_times(distribution: Time, low_s: float, high_s: float, mean_s: float) -> None:
    draw = draws.time_ns(distribution, Rng(1).stream("think"))
    times = [draw() for _ in range(5000)]
    assert low_s * SECOND <= min(times) <= max(times) <= high_s * SECOND
    assert fmean(times) / SECOND == pytest.approx(mean_s, rel=0.05)


def test_one_turn_is_a_request_by_itself() -> None:
    assert CHAT.sessions is not None
    alone = evolve(CHAT.sessions, turns=FixedTurns(turns=1), system_prompt_tokens=0, new_tokens=FixedLength(tokens=1))
    for session in drawn(evolve(CHAT, sessions=alone)):
        (turn,) = session.turns
        assert 10 <= turn.input_tokens <= 700
