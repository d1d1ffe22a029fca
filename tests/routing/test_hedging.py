"""Hedging: a second attempt elsewhere for those that wait for long, one answer whatever becomes of the two; and with
all rules at once, in any order of events, everybody is answered once and nothing is left over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdflow.protocol.events import TimeReached
from pdflow.protocol.messages import Code
from pdflow.routing.admission import AdmissionLimits
from pdflow.routing.conditional import Disaggregation
from pdflow.routing.effects import AbortLeg, DispatchAlone, DispatchDecode, DispatchPrefill, Reply
from pdflow.routing.events import (
    ClientGone,
    DecodeEnded,
    EngineChanged,
    EngineJoins,
    EngineLeaves,
    EngineLost,
    FirstTokenDelivered,
    PrefillAnswered,
    RequestArrived,
)

Make = Callable[..., Any]
AFTER = 100


@pytest.fixture
def hedged(governed: Make) -> Any:
    """Request 0 has been hedged."""
    it = governed(hedge_after_ns=AFTER, policy="least-loaded")
    it.handle(RequestArrived(0), 0)
    assert it.wake_at() == AFTER
    prefill, decode = it.handle(TimeReached(), AFTER)
    assert (prefill.engine, prefill.request_id, prefill.xid) == (1, "r0.2", "x0.2")
    assert (decode.engine, decode.request_id) == (1, "r0.2")
    return it


def test_the_first_to_finish_is_the_answer_and_the_other_is_taken_back(hedged: Any) -> None:
    it = hedged.fork()
    assert it.handle(DecodeEnded("r0.1"), 120) == (
        AbortLeg("prefill", 1, "r0.2"),
        AbortLeg("decode", 1, "r0.2"),
        AbortLeg("prefill", 0, "r0.1"),
        Reply(0, "completed", Code.NONE, 2),
    )
    assert it.handle(DecodeEnded("r0.2"), 121) == ()
    assert hedged.handle(DecodeEnded("r0.2"), 120)[-1] == Reply(0, "completed", Code.NONE, 2)
    assert hedged.handle(DecodeEnded("r0.1"), 121) == ()


def test_the_attempt_that_streams_first_continues(hedged: Any) -> None:
    """The other could only say the same from its start: its legs and blocks are taken back at once."""
    assert hedged.handle(FirstTokenDelivered(0, "r0.2"), 120) == (
        AbortLeg("prefill", 0, "r0.1"),
        AbortLeg("decode", 0, "r0.1"),
    )
    assert (hedged.pairs, list(hedged.attempts)) == ({}, ["r0.2"])
    assert (
        hedged.handle(FirstTokenDelivered(0, "r0.2"), 121) == hedged.handle(FirstTokenDelivered(0, "r0.1"), 122) == ()
    )
    assert hedged.handle(DecodeEnded("r0.2"), 130)[-1] == Reply(0, "completed", Code.NONE, 2)


def test_a_token_of_the_attempt_that_was_taken_back_ends_the_request(hedged: Any) -> None:
    """The client has it all the same, and neither of two attempts that were under way may begin the answer again."""
    it = hedged
    it.handle(DecodeEnded("r0.1", Code.STALLED), 110)
    it.handle(RequestArrived(1), 111)
    assert it.handle(FirstTokenDelivered(0, "r0.1"), 120)[-1] == Reply(0, "failed", Code.IO, 2)
    assert list(it.by_request) == [1]


def test_a_request_is_hedged_once(hedged: Any) -> None:
    assert hedged.wake_at() is None
    assert hedged.handle(TimeReached(), 10 * AFTER) == ()


def test_while_one_of_two_is_under_way_nothing_has_failed(hedged: Any) -> None:
    aborts = hedged.handle(DecodeEnded("r0.1", Code.STALLED), 120)
    assert aborts == (AbortLeg("prefill", 0, "r0.1"),)
    assert hedged.by_request[0].request_id == "r0.2"
    assert hedged.handle(DecodeEnded("r0.2", Code.STALLED), 130)[-1] == Reply(0, "failed", Code.STALLED, 2)
    assert (hedged.attempts, hedged.by_request, hedged.last) == ({}, {}, {})


def test_the_hedge_is_none_of_the_attempts_that_may_fail(governed: Make) -> None:
    it = governed(hedge_after_ns=AFTER, max_attempts=2, p=3, d=3)
    it.handle(RequestArrived(0), 0)
    it.handle(TimeReached(), AFTER)
    it.handle(DecodeEnded("r0.2", Code.STALLED), 120)
    *_, prefill, decode = it.handle(DecodeEnded("r0.1", Code.STALLED), 130)
    assert (prefill.request_id, decode.request_id) == ("r0.3", "r0.3")
    assert it.handle(DecodeEnded("r0.3", Code.STALLED), 140)[-1] == Reply(0, "failed", Code.STALLED, 3)


def test_whoever_leaves_takes_both_along(hedged: Any) -> None:
    effects = hedged.handle(ClientGone(0), 120)
    assert {effect.request_id for effect in effects[:-1]} == {"r0.1", "r0.2"}
    assert effects[-1] == Reply(0, "cancelled", Code.CANCELLED, 2)


@pytest.mark.parametrize("event", [FirstTokenDelivered(0, "r0.1"), DecodeEnded("r0.1"), ClientGone(0)])
def test_who_has_a_token_or_needs_none_is_not_hedged(governed: Make, event: Any) -> None:
    it = governed(hedge_after_ns=AFTER)
    it.handle(RequestArrived(0), 0)
    it.handle(RequestArrived(1), 50)
    it.handle(event, 99)
    assert it.wake_at() == 150
    assert it.handle(TimeReached(), AFTER) == ()


def test_more_of_the_same_engine_would_be_late_too(governed: Make) -> None:
    it = governed(hedge_after_ns=AFTER, p=1)
    it.handle(RequestArrived(0), 0)
    assert it.handle(TimeReached(), AFTER) == ()
    assert it.handle(DecodeEnded("r0.1"), 120)[-1] == Reply(0, "completed", Code.NONE, 1)


def test_without_an_engine_for_the_hedge_the_first_attempt_goes_on(governed: Make) -> None:
    it = governed(hedge_after_ns=AFTER)
    it.handle(RequestArrived(0), 0)
    for engine in ("d-0", "d-1"):
        it.handle(EngineChanged(engine, False), 0)
    assert it.handle(TimeReached(), AFTER) == (), "no D is up for its second leg"
    assert list(it.attempts) == ["r0.1"]
    assert it.handle(DecodeEnded("r0.1"), 120)[-1] == Reply(0, "completed", Code.NONE, 1)


def test_a_prompt_of_ds_own_is_hedged_at_another_d(governed: Make) -> None:
    it = governed(hedge_after_ns=AFTER, disaggregation=Disaggregation(((10,), (10,))))
    assert it.handle(RequestArrived(0), 0) == (DispatchAlone(0, 0, "r0.1"),)
    assert it.handle(TimeReached(), AFTER) == (DispatchAlone(1, 0, "r0.2"),)
    assert it.handle(EngineLost("d-0"), 120) == (AbortLeg("decode", 0, "r0.1"),)
    assert it.handle(DecodeEnded("r0.2"), 130) == (Reply(0, "completed", Code.NONE, 2),)


ENGINES = st.sampled_from(["p-0", "p-1", "d-0", "d-1", "d-2"])
REQUESTS = st.integers(0, 5)
IDS = st.builds("r{}.{}".format, REQUESTS, st.integers(1, 4))
CODES = st.sampled_from([Code.NONE, Code.NONE, Code.EXPIRED, Code.REJECTED])
EVENTS = st.one_of(
    st.builds(RequestArrived, REQUESTS, st.booleans(), st.integers(0, 60)),
    st.builds(RequestArrived, REQUESTS, st.just(False), st.integers(0, 60)),
    st.builds(ClientGone, REQUESTS),
    st.builds(lambda request_id: PrefillAnswered(request_id, None, Code.REJECTED), IDS),
    st.builds(DecodeEnded, IDS, CODES),
    st.builds(DecodeEnded, IDS, CODES),
    st.builds(EngineChanged, ENGINES, st.booleans()),
    st.builds(EngineLost, ENGINES),
    st.builds(EngineLeaves, ENGINES),
    st.builds(EngineJoins, ENGINES),
    st.builds(
        lambda request, number: FirstTokenDelivered(request, f"r{request}.{number}"), REQUESTS, st.integers(1, 4)
    ),
    st.just(TimeReached()),
    st.just("answer"),
)
OPTIONS = st.fixed_dictionaries(
    {
        "policy": st.sampled_from(["round-robin", "least-loaded"]),
        "dispatch": st.sampled_from(["sequential", "concurrent"]),
        "max_attempts": st.integers(1, 3),
        "reports_prefill": st.booleans(),
        "recomputes": st.booleans(),
        "disaggregation": st.sampled_from([None, Disaggregation(((20, 5),) * 3)]),
        "admission": st.builds(AdmissionLimits, st.sampled_from([None, 3]), st.sampled_from([None, 50])),
    }
)
HEDGES: dict[str, Any] = {"hedge_after_ns": 2}


class Played:
    """A router, and the world's side of it: what was dispatched, and who was told what."""

    def __init__(self, it: Any, answer: Make) -> None:
        self.it = it
        self.answer = answer
        self.now = 0
        self.prefills: list[DispatchPrefill] = []
        self.ids: set[tuple[type, str]] = set()
        self.replies: Counter[int] = Counter()
        self.begun: dict[int, str] = {}
        """By request: the attempt whose token its client has had."""
        self.arrived: set[int] = set()

    def do(self, event: Any) -> tuple[Any, ...]:
        self.now += 1
        if event == "answer":
            return tuple(effect for leg in self.prefills[-2:] for effect in self.do(self.answer(leg)))
        if isinstance(event, RequestArrived):
            if event.request in self.arrived:
                return ()
            self.arrived.add(event.request)
        if isinstance(event, FirstTokenDelivered):
            attempt = (DispatchPrefill, event.request_id), (DispatchDecode, event.request_id)
            known = any(leg in self.ids for leg in (*attempt, (DispatchAlone, event.request_id)))
            if not known or event.request in self.begun or self.replies[event.request]:
                return ()
            self.begun[event.request] = event.request_id
        effects = self.it.handle(event, self.now)
        for effect in effects:
            if isinstance(effect, (DispatchPrefill, DispatchDecode, DispatchAlone)):
                assert self.replies[effect.request] == 0
                assert effect.request not in self.begun, "never two beginnings"
                assert (type(effect), effect.request_id) not in self.ids, "a leg is dispatched once"
                self.ids.add((type(effect), effect.request_id))
            if isinstance(effect, DispatchPrefill):
                self.prefills.append(effect)
            elif isinstance(effect, Reply):
                self.replies[effect.request] += 1
        assert max(self.replies.values(), default=1) == 1, "never two answers"
        assert set(self.it.by_request) == {attempt.request for attempt in self.it.attempts.values()}
        return tuple(effects)


@settings(max_examples=300, derandomize=True, deadline=None)
@given(options=OPTIONS, hedges=st.sampled_from([{}, HEDGES]), events=st.lists(EVENTS, max_size=40))
def test_any_order_of_events(governed: Make, answer: Make, options: Any, hedges: Any, events: list[Any]) -> None:
    it = governed(p=2, d=3, **options, **hedges)
    played = Played(it, answer)
    for event in events:
        if not isinstance(event, TimeReached) or hedges:
            played.do(event)
        own = Counter(attempt.request for attempt in it.attempts.values())
        assert max(own.values(), default=0) <= (2 if hedges else 1)
        open_legs = sum(a.p_open + a.d_open for a in it.attempts.values())
        assert sum(it.prefill_choice.loads) + sum(it.decode_choice.loads) == open_legs
    for request in played.arrived:
        played.do(ClientGone(request))
    assert played.replies == Counter(played.arrived)
    assert not any(it.prefill_choice.loads + it.decode_choice.loads + it.membership.users)
    assert (it.attempts, it.by_request, it.prefill_choice.open_tokens) == ({}, {}, 0)
    assert not it.membership.leaving, "who was to leave has left"
    if hedges:
        assert (it.pairs, it.last, it.deadlines.due, it.wake_at()) == ({}, {}, {}, None)


@settings(max_examples=150, derandomize=True, deadline=None)
@given(
    options=OPTIONS,
    hedges=st.sampled_from([{}, HEDGES]),
    before=st.lists(EVENTS, max_size=20),
    aside=st.lists(EVENTS, max_size=5),
    after=st.lists(EVENTS, max_size=15),
)
def test_a_fork_of_the_same_state_goes_its_own_way(
    governed: Make, answer: Make, options: Any, hedges: Any, before: list[Any], aside: list[Any], after: list[Any]
) -> None:
    it = Played(governed(p=2, d=3, **options, **hedges), answer)

    def fits(events: list[Any]) -> list[Any]:
        return [event for event in events if hedges or not isinstance(event, TimeReached)]

    def forked() -> Played:
        other = Played(it.it.fork(), answer)
        other.now, other.prefills, other.arrived = it.now, it.prefills.copy(), it.arrived.copy()
        other.ids, other.begun, other.replies = it.ids.copy(), it.begun.copy(), it.replies.copy()
        return other

    for event in fits(before):
        it.do(event)
    fork, other = forked(), forked()
    assert fork.it.fingerprint() == it.it.fingerprint()
    for event in fits(aside):
        other.do(event)
    for event in fits(after):
        assert it.do(event) == fork.do(event)
        assert it.it.fingerprint() == fork.it.fingerprint()
