"""The router: engines are chosen by the policy, legs start in the order of the dispatch, attempts never share an id,
and whatever happens in whatever order, every request gets one reply and every load goes back to zero.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdflow.protocol.errors import LocalProtocolError
from pdflow.protocol.ids import EngineInfo, KvParams, Shards
from pdflow.protocol.messages import Code
from pdflow.routing.effects import AbortLeg, DispatchDecode, DispatchPrefill, Reply, ReportPrefill
from pdflow.routing.events import (
    ClientGone,
    DecodeEnded,
    EngineChanged,
    EngineLost,
    FirstTokenDelivered,
    PrefillAnswered,
    RequestArrived,
)
from pdflow.routing.failure import AfterFailure, after_failure
from pdflow.routing.policy import Choice
from pdflow.routing.router import Router


def engines(name: str, count: int) -> tuple[EngineInfo, ...]:
    return tuple(EngineInfo(f"{name}-{i}", Shards(1, 1, 16)) for i in range(count))


def router(**options: Any) -> Router:
    options = {"policy": "round-robin", "dispatch": "concurrent", **options}
    return Router(engines("p", options.pop("p", 2)), engines("d", options.pop("d", 2)), **options)


def answer(effect: Any) -> PrefillAnswered:
    params = KvParams(EngineInfo(f"p-{effect.engine}", Shards(1, 1, 16)), effect.xid, effect.request_id, 5)
    return PrefillAnswered(effect.request_id, params)


def test_round_robin_takes_turns_and_passes_over_who_is_down() -> None:
    choice = Choice("round-robin", 3)
    assert [choice.take() for _ in range(4)] == [0, 1, 2, 0]
    choice.up[1] = False
    assert {choice.take() for _ in range(4)} == {0, 2}
    choice.up = [False] * 3
    assert choice.take() is None


def test_least_loaded_takes_the_first_of_the_least() -> None:
    choice = Choice("least-loaded", 3)
    assert [choice.take() for _ in range(3)] == [0, 1, 2]
    choice.give_back(1)
    assert choice.take() == 1
    assert choice.take(avoid=0) == 1
    assert choice.loads == [1, 2, 1]


@pytest.mark.parametrize("policy", ["round-robin", "least-loaded"])
def test_a_retry_goes_elsewhere_if_there_is_an_elsewhere(policy: Any) -> None:
    choice = Choice(policy, 2)
    first = choice.take()
    assert first is not None
    choice.give_back(first)
    assert choice.take(avoid=0) == 1
    alone = Choice(policy, 1)
    assert alone.take(avoid=0) == 0


def test_sequential_dispatch_waits_for_the_prefill_leg() -> None:
    it = router(dispatch="sequential")
    (prefill,) = it.handle(RequestArrived(0), 0)
    assert prefill == DispatchPrefill(0, 0, "r0.1", "x0.1")
    answered = answer(prefill)
    (decode,) = it.handle(answered, 1)
    assert decode == DispatchDecode(0, 0, "r0.1", answered.params)  # type: ignore[arg-type]
    assert it.handle(DecodeEnded("r0.1"), 2) == (Reply(0, "completed", Code.NONE, 1),)


def test_concurrent_dispatch_sends_both_legs_with_ps_coordinates() -> None:
    it = router()
    prefill, decode = it.handle(RequestArrived(0), 0)
    assert isinstance(decode, DispatchDecode)
    assert (decode.params.prefill.engine, decode.params.xid, decode.params.num_tokens) == ("p-0", "x0.1", 0)
    assert it.handle(answer(prefill), 1) == ()


@pytest.mark.parametrize("dispatch", ["sequential", "concurrent"])
def test_a_d_that_cannot_ask_p_is_notified_how_the_prefill_leg_ended(dispatch: Any) -> None:
    it = router(dispatch=dispatch, reports_prefill=True)
    prefill, *_ = it.handle(RequestArrived(0), 0)
    assert it.handle(answer(prefill), 1)[-1] == ReportPrefill(0, "r0.1", True)
    assert it.handle(DecodeEnded("r0.1"), 2) == (Reply(0, "completed", Code.NONE, 1),)


def test_and_when_the_prefill_leg_is_taken_back_or_fails() -> None:
    it = router(reports_prefill=True)
    it.handle(RequestArrived(0), 0)
    it.handle(RequestArrived(1), 0)
    assert it.handle(ClientGone(0), 1) == (
        AbortLeg("prefill", 0, "r0.1"),
        AbortLeg("decode", 0, "r0.1"),
        ReportPrefill(0, "r0.1", True),
        Reply(0, "cancelled", Code.CANCELLED, 1),
    )
    assert it.handle(PrefillAnswered("r1.1", None, Code.REJECTED), 1) == (
        ReportPrefill(1, "r1.1", False),
        AbortLeg("decode", 1, "r1.1"),
        Reply(1, "failed", Code.REJECTED, 1),
    )


def test_a_request_of_one_token_from_p_needs_no_decode_leg() -> None:
    it = router()
    (prefill,) = it.handle(RequestArrived(0, prefill_only=True), 0)
    assert it.handle(answer(prefill), 1) == (Reply(0, "completed", Code.NONE, 1),)


def test_a_retry_is_a_new_attempt_at_other_engines() -> None:
    it = router(max_attempts=2)
    it.handle(RequestArrived(0), 0)
    assert it.handle(DecodeEnded("r0.1", Code.EXPIRED), 1) == (
        AbortLeg("prefill", 0, "r0.1"),
        DispatchPrefill(1, 0, "r0.2", "x0.2"),
        DispatchDecode(1, 0, "r0.2", KvParams(engines("p", 2)[1], "x0.2", "r0.2", 0)),
    )
    assert it.handle(PrefillAnswered("r0.1", None, Code.CANCELLED), 2) == (), (
        "what is left of the former attempt is mute"
    )
    assert it.handle(DecodeEnded("r0.2", Code.EXPIRED), 3)[-1] == Reply(0, "failed", Code.EXPIRED, 2)


@pytest.mark.parametrize(
    "failure",
    [DecodeEnded("r0.1", Code.EXPIRED), PrefillAnswered("r0.1", None, Code.IO), EngineLost("d-0"), EngineLost("p-0")],
    ids=lambda failure: type(failure).__name__,
)
def test_a_started_answer_is_not_begun_again(failure: Any) -> None:
    """Its client would receive two beginnings; so the failure is the request's, whatever attempts are left."""
    it = router(max_attempts=3)
    it.handle(RequestArrived(0), 0)
    assert it.handle(FirstTokenDelivered(0, "r0.1"), 1) == ()
    *aborts, reply = it.handle(failure, 2)
    assert (reply.outcome, reply.attempts) == ("failed", 1)
    assert all(isinstance(effect, AbortLeg) for effect in aborts)
    assert it.attempts == {}


def test_a_started_answer_ends_as_any_other() -> None:
    it = router()
    it.handle(RequestArrived(0), 0)
    it.handle(FirstTokenDelivered(0, "r0.1"), 1)
    assert it.handle(DecodeEnded("r0.1"), 2)[-1] == Reply(0, "completed", Code.NONE, 1)
    assert it.handle(FirstTokenDelivered(0, "r0.1"), 3) == ()


def test_a_token_of_an_attempt_that_was_taken_back_ends_the_request() -> None:
    """It had reached the client before the router heard of the failure."""
    it = router(max_attempts=3)
    it.handle(RequestArrived(0), 0)
    it.handle(DecodeEnded("r0.1", Code.EXPIRED), 1)
    assert it.handle(FirstTokenDelivered(0, "r0.1"), 2) == (
        AbortLeg("prefill", 1, "r0.2"),
        AbortLeg("decode", 1, "r0.2"),
        Reply(0, "failed", Code.IO, 2),
    )


@pytest.mark.parametrize(
    ("code", "started", "attempts", "follows"),
    [
        (Code.EXPIRED, False, 1, AfterFailure.RETRY),
        (Code.EXPIRED, False, 2, AfterFailure.FAIL),
        (Code.EXPIRED, True, 1, AfterFailure.FAIL),
        (Code.REJECTED, False, 1, AfterFailure.FAIL),
        (Code.REJECTED, True, 1, AfterFailure.FAIL),
    ],
)
def test_what_follows_a_failure(code: Code, started: bool, attempts: int, follows: AfterFailure) -> None:
    assert after_failure(code, started, attempts, 2) is follows


def test_nothing_decides_to_resume_yet() -> None:
    cases = itertools.product(Code, (False, True), (1, 2), (1, 2))
    assert {after_failure(*case) for case in cases} == {AfterFailure.FAIL, AfterFailure.RETRY}


def test_what_an_engine_refuses_is_not_tried_again() -> None:
    """The request is at fault: another engine would say the same, and the client waits for it."""
    it = router(max_attempts=3)
    it.handle(RequestArrived(0), 0)
    assert it.handle(PrefillAnswered("r0.1", None, Code.REJECTED), 1) == (
        AbortLeg("decode", 0, "r0.1"),
        Reply(0, "failed", Code.REJECTED, 1),
    )


def test_a_retried_decode_leg_goes_elsewhere_too_when_legs_are_sent_in_turn() -> None:
    it = router(dispatch="sequential", policy="least-loaded", max_attempts=2)
    (prefill,) = it.handle(RequestArrived(0), 0)
    (decode,) = it.handle(answer(prefill), 0)
    (prefill,) = it.handle(DecodeEnded("r0.1", Code.DEADLINE), 0)
    (again,) = it.handle(answer(prefill), 0)
    assert isinstance(decode, DispatchDecode)
    assert isinstance(again, DispatchDecode)
    assert (decode.engine, again.engine) == (0, 1)


def test_nobody_is_up() -> None:
    it = router(p=1, d=1)
    it.handle(EngineChanged("d-0", False), 0)
    assert it.handle(RequestArrived(0), 0) == (Reply(0, "failed", Code.UNREACHABLE, 0),)
    it.handle(EngineChanged("p-0", False), 0)
    assert it.handle(RequestArrived(1), 0) == (Reply(1, "failed", Code.UNREACHABLE, 0),)
    assert (it.prefill_choice.loads, it.decode_choice.loads) == ([0], [0])


def test_the_legs_of_an_engine_that_is_lost_are_retried_elsewhere() -> None:
    it = router(max_attempts=2)
    it.handle(RequestArrived(0), 0)
    it.handle(RequestArrived(1), 0)
    *aborts, prefill, decode = it.handle(EngineLost("p-0"), 0)
    assert aborts == [AbortLeg("prefill", 0, "r0.1"), AbortLeg("decode", 0, "r0.1")]
    assert isinstance(prefill, DispatchPrefill)
    assert isinstance(decode, DispatchDecode)
    assert (prefill.engine, prefill.request_id) == (1, "r0.2")
    replies = [effect for effect in it.handle(EngineLost("p-1"), 0) if isinstance(effect, Reply)]
    assert replies == [Reply(1, "failed", Code.UNREACHABLE, 1), Reply(0, "failed", Code.PEER_DEAD, 2)]
    assert it.attempts == {}


def test_a_lost_p_is_never_reported_as_not_writing() -> None:
    """It may have finished, its answer lost with it; then what its NIC has begun lands all the same (S1, compat)."""
    it = router(p=1, d=1, reports_prefill=True)
    it.handle(RequestArrived(0), 0)
    assert it.handle(EngineLost("p-0"), 0) == (
        AbortLeg("prefill", 0, "r0.1"),
        AbortLeg("decode", 0, "r0.1"),
        ReportPrefill(0, "r0.1", True),
        Reply(0, "failed", Code.PEER_DEAD, 1),
    )


def test_a_decode_leg_that_is_lost_fails_without_further_attempts() -> None:
    it = router(p=1, d=1)
    prefill, _ = it.handle(RequestArrived(0), 0)
    assert isinstance(prefill, DispatchPrefill)
    it.handle(answer(prefill), 0)
    assert it.handle(EngineLost("d-0"), 0) == (AbortLeg("decode", 0, "r0.1"), Reply(0, "failed", Code.PEER_DEAD, 1))
    assert it.handle(EngineLost("d-0"), 0) == ()


def test_an_engine_comes_back_under_another_id() -> None:
    it = router(p=1)
    it.handle(EngineLost("p-0"), 0)
    it.handle(EngineChanged("p-0", True, EngineInfo("p-0+1", Shards(1, 1, 16))), 0)
    _, decode = it.handle(RequestArrived(0), 0)
    assert isinstance(decode, DispatchDecode)
    assert decode.params.prefill.engine == "p-0+1"
    assert it.handle(EngineLost("p-0"), 0) == ()


def test_a_request_arrives_once() -> None:
    it = router()
    it.handle(RequestArrived(0), 0)
    before = it.fingerprint()
    with pytest.raises(LocalProtocolError):
        it.handle(RequestArrived(0), 0)
    assert it.fingerprint() == before


EVENTS = st.one_of(
    st.builds(RequestArrived, st.integers(0, 5), st.booleans()),
    st.builds(ClientGone, st.integers(0, 5)),
    st.builds(
        lambda request, number, well: PrefillAnswered(
            f"r{request}.{number}",
            KvParams(engines("p", 1)[0], f"x{request}.{number}", f"r{request}.{number}", 5) if well else None,
            Code.NONE if well else Code.REJECTED,
        ),
        st.integers(0, 5),
        st.integers(1, 3),
        st.booleans(),
    ),
    st.builds(DecodeEnded, st.builds("r{}.{}".format, st.integers(0, 5), st.integers(1, 3)), st.sampled_from(Code)),
    st.builds(EngineChanged, st.sampled_from(["p-0", "p-1", "d-0", "d-1", "d-2"]), st.booleans()),
    st.builds(EngineLost, st.sampled_from(["p-0", "p-1", "d-0", "d-1", "d-2"])),
    st.builds(
        lambda request, number: FirstTokenDelivered(request, f"r{request}.{number}"),
        st.integers(0, 5),
        st.integers(1, 3),
    ),
)


@settings(max_examples=200, derandomize=True, deadline=None)
@given(
    policy=st.sampled_from(["round-robin", "least-loaded"]),
    dispatch=st.sampled_from(["sequential", "concurrent"]),
    before=st.lists(EVENTS, max_size=15),
    aside=st.lists(EVENTS, max_size=5),
    after=st.lists(EVENTS, max_size=15),
)
def test_a_fork_of_the_same_state_goes_its_own_way(
    policy: Any, dispatch: Any, before: list[Any], aside: list[Any], after: list[Any]
) -> None:
    """And a fingerprint says where that is: equal ones lead to equal effects and equal fingerprints."""
    it = router(policy=policy, dispatch=dispatch, max_attempts=3, reports_prefill=True, p=2, d=3)

    def handled(on: Router, event: Any) -> Any:
        return (
            "refused" if isinstance(event, RequestArrived) and event.request in on.by_request else on.handle(event, 0)
        )

    for event in before:
        handled(it, event)
    fork, other = it.fork(), it.fork()
    state = it.fingerprint()
    assert fork.fingerprint() == state
    for event in aside:
        handled(other, event)
    assert it.fingerprint() == fork.fingerprint() == state
    for event in after:
        assert handled(it, event) == handled(fork, event)
        assert it.fingerprint() == fork.fingerprint()


def test_turns_that_fall_alike_have_one_fingerprint() -> None:
    once, again = Choice("round-robin", 2), Choice("round-robin", 2)
    for _ in range(2):
        again.give_back(again.take() or 0)
        again.give_back(again.take() or 0)
    assert once.next_turn != again.next_turn
    assert once.fingerprint() == again.fingerprint()
    again.give_back(again.take() or 0)
    assert once.fingerprint() != again.fingerprint()


@settings(max_examples=200, derandomize=True, deadline=None)
@given(
    data=st.data(),
    policy=st.sampled_from(["round-robin", "least-loaded"]),
    dispatch=st.sampled_from(["sequential", "concurrent"]),
    max_attempts=st.integers(1, 3),
    reports=st.booleans(),
)
def test_any_order_of_events(data: st.DataObject, policy: Any, dispatch: Any, max_attempts: int, reports: bool) -> None:
    """Legs end well or badly, late, twice or for nobody; clients leave; engines come and go."""
    it = router(policy=policy, dispatch=dispatch, max_attempts=max_attempts, reports_prefill=reports, p=2, d=3)
    replies: Counter[int] = Counter()
    ids: set[str] = set()
    prefills: list[DispatchPrefill] = []
    decodes: list[DispatchDecode] = []
    begun: dict[int, str] = {}
    arrived = 0

    def feed(event: Any) -> None:
        for effect in it.handle(event, 0):
            assert not isinstance(effect, (DispatchPrefill, DispatchDecode)) or effect.request not in begun
            if isinstance(effect, DispatchPrefill):
                assert effect.request_id not in ids
                assert effect.xid not in ids
                ids.update((effect.request_id, effect.xid))
                prefills.append(effect)
            elif isinstance(effect, DispatchDecode):
                assert effect.request_id in ids
                assert effect.params.request_id == effect.request_id
                decodes.append(effect)
            elif isinstance(effect, Reply):
                replies[effect.request] += 1
                assert effect.attempts <= max_attempts

    code = st.sampled_from([Code.EXPIRED, Code.REJECTED, Code.UNREACHABLE])
    for _ in range(data.draw(st.integers(1, 40))):
        what = data.draw(
            st.sampled_from(
                ["arrive", "arrive", "prefill", "prefill", "decode", "decode", "gone", "engine", "lost", "token"]
            )
        )
        well = data.draw(st.booleans())
        if what == "arrive":
            feed(RequestArrived(arrived, prefill_only=data.draw(st.integers(0, 5)) == 0))
            arrived += 1
        elif what == "prefill" and prefills:
            leg = data.draw(st.sampled_from(prefills))
            feed(answer(leg) if well else PrefillAnswered(leg.request_id, None, data.draw(code)))
        elif what == "decode" and decodes:
            feed(DecodeEnded(data.draw(st.sampled_from(decodes)).request_id, Code.NONE if well else data.draw(code)))
        elif what == "token" and decodes:
            leg = data.draw(st.sampled_from(decodes))
            if leg.request not in begun and not replies[leg.request]:
                begun[leg.request] = leg.request_id
                feed(FirstTokenDelivered(leg.request, leg.request_id))
        elif what == "gone" and arrived:
            feed(ClientGone(data.draw(st.integers(0, arrived - 1))))
        elif what == "engine":
            feed(EngineChanged(data.draw(st.sampled_from(["p-0", "p-1", "d-0", "d-1", "d-2"])), well))
        elif what == "lost":
            feed(EngineLost(data.draw(st.sampled_from(["p-0", "p-1", "d-0", "d-1", "d-2"]))))
    assert max(replies.values(), default=1) == 1
    open_legs = sum(a.p_open + a.d_open for a in it.attempts.values())
    assert sum(it.prefill_choice.loads) + sum(it.decode_choice.loads) == open_legs
    while it.attempts:
        for leg in list(prefills):
            feed(answer(leg))
        for decode in list(decodes):
            feed(DecodeEnded(decode.request_id))
    assert replies == Counter(range(arrived))
    assert not any(it.prefill_choice.loads + it.decode_choice.loads)
    assert it.by_request == {}
