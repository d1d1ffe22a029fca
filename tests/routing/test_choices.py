"""Policies that look at the request: where each sends it, what bounds the load, and what they remember."""

from __future__ import annotations

from collections import deque
from math import log2
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdflow.protocol.ids import EngineInfo, Shards
from pdflow.routing.affinity import SessionAffinity
from pdflow.routing.events import EngineLost, RequestArrived
from pdflow.routing.policy import Choice
from pdflow.routing.prefix_aware import PrefixAware
from pdflow.routing.router import Router
from pdflow.routing.two_choices import TwoChoices, mixed

BLOCK = 10


def asked(request: int, tokens: int = 0, prefix: tuple[int, ...] = (), session: int = -1) -> RequestArrived:
    return RequestArrived(request, False, tokens, prefix, session)


def prefix_aware(engines: int = 3, names: int = 100, **options: Any) -> PrefixAware:
    return PrefixAware((names,) * engines, BLOCK, **options)


def choices(engines: int) -> dict[str, Choice]:
    return {
        "round-robin": Choice("round-robin", engines),
        "least-loaded": Choice("least-loaded", engines),
        "two-choices": TwoChoices(engines, 7),
        "prefix-aware": prefix_aware(engines, names=4),
        "session-affinity": SessionAffinity(engines, most_sessions=3),
    }


POLICIES = tuple(choices(1))


# Two choices.


def test_the_longest_queue_of_two_choices_grows_with_the_logarithm_of_the_logarithm() -> None:
    """n balls into n bins: log2 log2 n + O(1), where one choice alone has many more."""
    for n in (64, 256, 1024):
        two = TwoChoices(n, 1)
        one = [0] * n
        for request in range(n):
            two.choose(asked(request), None)
            one[mixed(request) % n] += 1
        assert max(two.loads) <= log2(log2(n)) + 1 < max(one)


def test_uneven_work_piles_up_with_round_robin_and_not_with_two_choices() -> None:
    """Every eighth request takes long, and there are eight engines: taking turns gives all of these to one."""

    def longest(choice: Choice) -> int:
        under_way: deque[tuple[RequestArrived, int]] = deque()
        most = 0
        for request in range(4000):
            it = asked(request)
            engine = choice.choose(it, None)
            assert engine is not None
            if request % 8:
                choice.ended(it, engine)
            else:
                under_way.append((it, engine))
            if len(under_way) > 32:
                choice.ended(*under_way.popleft())
            most = max(most, *choice.loads)
        return most

    assert longest(Choice("round-robin", 8)) >= 32
    assert longest(TwoChoices(8, 1)) <= 8


def test_the_two_are_the_same_in_every_run_of_a_seed() -> None:
    def picks(seed: int) -> list[int | None]:
        choice = TwoChoices(16, seed)
        return [choice.choose(asked(request), None) for request in range(100)]

    assert picks(1) == picks(1) != picks(2)
    assert set(picks(1)) == set(range(16))


# Prefixes.


def test_a_prompt_goes_where_most_of_it_is_known() -> None:
    it = prefix_aware()
    assert it.choose(asked(0, 100, (1, 2, 3)), None) == 0
    assert it.choose(asked(1, 100, (7, 8)), None) == 1
    it.ended(asked(0, 100), 0)
    it.ended(asked(1, 100), 1)
    assert it.matched(asked(2, 100, (1, 2, 9))) == [20, 0, 0]
    assert it.choose(asked(2, 100, (1, 2, 9)), None) == 0
    assert it.choose(asked(3, 100, (7, 8, 9)), None) == 1
    it.ended(asked(3, 100), 1)
    assert it.found(asked(4, 100, (7, 8, 9)), 1) == 30


def test_the_last_token_is_computed_in_any_case() -> None:
    it = prefix_aware()
    it.choose(asked(0, 20, (1, 2)), None)
    assert it.matched(asked(1, 20, (1, 2)))[0] == 19


@pytest.mark.parametrize(("weight", "engine"), [(1.0, 1), (2.0, 0)])
def test_it_does_not_wait_for_longer_than_computing_takes(weight: float, engine: int) -> None:
    """100 tokens wait at engine 0, which has 60 of those that are asked for."""
    it = prefix_aware(2, weight=weight)
    it.choose(asked(0, 100, (1, 2, 3, 4, 5, 6)), None)
    assert it.choose(asked(1, 70, (1, 2, 3, 4, 5, 6)), None) == engine


def test_what_is_known_already_does_not_wait() -> None:
    p, d = prefix_aware(1), prefix_aware(1, stays=True)
    for request in range(2):
        for choice in (p, d):
            choice.choose(asked(request, 35, (1, 2, 3)), None)
    assert p.loads_tokens == [35 + 5]
    assert d.loads_tokens == [35 + 35], "D's steps read the whole prompt"
    for request in range(2):
        p.ended(asked(request, 35), 0)
    assert p.loads_tokens == [0]


def test_it_remembers_no_more_than_the_engine_can() -> None:
    it = prefix_aware(1, names=4)
    it.choose(asked(0, 40, (1, 2, 3)), None)
    it.choose(asked(1, 40, (7, 8)), None)
    assert it.matched(asked(2, 40, (1, 2, 3))) == [20], "the end of the older prompt is forgotten first"
    assert it.matched(asked(2, 40, (7, 8))) == [20]
    it.choose(asked(3, 40, (1, 2)), None)
    it.choose(asked(4, 40, (9,)), None)
    assert it.matched(asked(5, 40, (7, 8))) == [10], "what was used again stays"
    assert len(it.known[0]) == len(it.holders) == 4


def test_a_restarted_engine_has_no_cached_prefixes() -> None:
    it, session = prefix_aware(2), SessionAffinity(2)
    it.choose(asked(0, 40, (1, 2)), None)
    it.forget(0)
    assert it.matched(asked(1, 40, (1, 2))) == [0, 0]
    assert it.holders == {}
    session.choose(asked(0, session=5), None)
    session.forget(0)
    assert session.assigned == {}


def test_the_router_forgets_what_a_lost_engine_had() -> None:
    p, d = (tuple(EngineInfo(f"{role}-{i}", Shards(1, 1, 16)) for i in range(2)) for role in "pd")
    choices = prefix_aware(2), prefix_aware(2)
    it = Router(p, d, "prefix-aware", "concurrent", choices=choices)
    it.handle(asked(0, 40, (1, 2)), 0)
    it.handle(EngineLost("d-0"), 0)
    assert [choice.matched(asked(1, 40, (1, 2))) for choice in choices] == [[20, 0], [0, 0]]


# Sessions.


def test_a_session_goes_where_it_went_before() -> None:
    it = SessionAffinity(3)
    first = {session: it.choose(asked(session, session=session), None) for session in range(3)}
    assert first == {0: 0, 1: 1, 2: 2}
    for session in (2, 0, 1):
        it.ended(asked(session), session)
        assert it.choose(asked(9, session=session), None) == session


def test_a_session_returns_to_the_engine_of_its_earlier_turns() -> None:
    it = SessionAffinity(2)
    it.choose(asked(0, 100, session=3), None)
    turn = asked(1, 180, session=3)
    assert (it.found(turn, 0), it.found(turn, 1), it.found(asked(2, 180), 0)) == (100, 0, 0)
    assert it.found(asked(3, 100, session=3), 0) == 99, "the last token is computed in any case"


def test_a_session_leaves_an_engine_that_is_down_or_full_for_good() -> None:
    it = SessionAffinity(2)
    it.choose(asked(0, session=0), None)
    it.up[0] = False
    assert it.choose(asked(1, session=0), None) == 1
    it.up[0] = True
    assert [it.choose(asked(request, session=0), None) for request in range(2, 5)] == [1, 1, 1]
    assert it.loads == [1, 4], "one more of six would be more than a half and a quarter of that"
    assert [it.choose(asked(request, session=0), None) for request in range(5, 7)] == [0, 0]


@settings(max_examples=50, derandomize=True, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=200), st.sampled_from([1.0, 1.25, 2.0]))
def test_no_engine_has_more_than_its_bounded_share(sessions: list[int], most_load: float) -> None:
    it = SessionAffinity(4, most_load)
    for request, session in enumerate(sessions):
        it.choose(asked(request, session=session), None)
    assert max(it.loads) <= most_load * len(sessions) / 4 + 1


# All of them.


@pytest.mark.parametrize("policy", POLICIES)
def test_a_retry_goes_elsewhere_and_nowhere_when_all_are_down(policy: str) -> None:
    it = choices(3)[policy]
    for request in range(20):
        assert it.choose(asked(request, 30, (1, 2), 4), 1) != 1
    it.up = [False, True, False]
    assert it.choose(asked(20, 30, (1, 2), 4), 1) == 1
    it.up = [False] * 3
    assert it.choose(asked(21, 30, (1, 2), 4), None) is None
    assert it.pick(asked(21, 30, (1, 2), 4), None) is None


ASKED = st.builds(
    lambda tokens, length, session: (tokens + BLOCK * length, tuple(range(session, session + length)), session),
    st.integers(0, 50),
    st.integers(0, 6),
    st.integers(-1, 5),
)
DEED = st.one_of(
    st.tuples(st.just("choose"), ASKED),
    st.tuples(st.just("end"), st.integers(0, 100)),
    st.tuples(st.just("turn"), st.integers(0, 2)),
)


class Driver:
    """Does the same things to any choice: legs begin and end, engines come and go."""

    def __init__(self, choice: Choice, requests: int = 0, under_way: tuple[Any, ...] = ()) -> None:
        self.choice = choice
        self.requests = requests
        self.under_way = list(under_way)

    def fork(self) -> Driver:
        return Driver(self.choice.fork(), self.requests, tuple(self.under_way))

    def do(self, deed: Any) -> Any:
        what, arg = deed
        choice = self.choice
        if what == "choose":
            it = asked(self.requests, *arg)
            self.requests += 1
            expected = choice.pick(it, None)
            chosen = choice.choose(it, None)
            assert chosen == expected
            if chosen is not None:
                self.under_way.append((it, chosen))
            return chosen
        if what == "end":
            if self.under_way:
                choice.ended(*self.under_way.pop(arg % len(self.under_way)))
        else:
            choice.up[arg] = not choice.up[arg]
            if not choice.up[arg]:
                choice.forget(arg)
        return None


@settings(max_examples=100, derandomize=True, deadline=None)
@given(
    policy=st.sampled_from(POLICIES),
    before=st.lists(DEED, max_size=20),
    aside=st.lists(DEED, max_size=5),
    after=st.lists(DEED, max_size=15),
)
def test_a_fork_of_the_same_state_goes_its_own_way(policy: str, before: Any, aside: Any, after: Any) -> None:
    """And nothing is counted that is not open."""
    it = Driver(choices(3)[policy])
    for deed in before:
        it.do(deed)
    fork, other = it.fork(), it.fork()
    for deed in aside:
        other.do(deed)
    assert it.choice.fingerprint() == fork.choice.fingerprint()
    for deed in after:
        assert it.do(deed) == fork.do(deed)
        assert it.choice.fingerprint() == fork.choice.fingerprint()
    assert sum(it.choice.loads) == len(it.under_way)
    assert it.choice.open_tokens == sum(leg.prompt_tokens for leg, _ in it.under_way)
    while it.under_way:
        it.do(("end", 0))
    assert not any(it.choice.loads)
    assert it.choice.open_tokens == 0


def test_the_two_are_drawn_as_splitmix64_draws() -> None:
    """The first outputs of its generator with the seeds 0 and 1234567 (Steele, Lea, Flood, 2014)."""
    assert mixed(0) == 0xE220A8397B1DCDAF
    assert mixed(1234567) == 6457827717110365317
