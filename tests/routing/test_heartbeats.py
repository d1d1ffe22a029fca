"""Who is a member follows from the reports that have come, and only members get legs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdflow.protocol.errors import LocalProtocolError
from pdflow.protocol.ids import EngineInfo, Shards
from pdflow.protocol.messages import Code
from pdflow.protocol.values import S
from pdflow.routing.effects import DispatchAlone, DispatchDecode, DispatchPrefill, EngineSilent, Reply
from pdflow.routing.events import (
    DecodeEnded,
    EngineJoins,
    EngineLeaves,
    EngineLost,
    EngineReported,
    PrefillAnswered,
    RequestArrived,
)
from pdflow.routing.heartbeats import Roll, Seat, silence_ns

Make = Callable[..., Any]
SILENCE = 5


def reports(role: Any, index: int, suffix: str = "") -> EngineReported:
    return EngineReported(role, index, EngineInfo(f"{role[0]}-{index}{suffix}", Shards(1, 1, 16)))


def members_by_hand(report_log: list[tuple[int, Seat]], now: int) -> set[Seat]:
    """Whoever has reported within the last while."""
    return {seat for at, seat in report_log if now - at < SILENCE}


def test_as_in_the_original_it_is_five_seconds_for_three() -> None:
    assert silence_ns(3 * S) == 5 * S


SEATS: list[Seat] = [("prefill", 0), ("prefill", 1), ("decode", 0), ("decode", 1)]


@settings(max_examples=300, derandomize=True, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from([None, *SEATS])), max_size=40))
def test_a_member_is_who_has_reported_lately(steps: list[tuple[int, Seat | None]]) -> None:
    roll, report_log, now = Roll(SILENCE), list[tuple[int, Seat]](), 0
    for gap, seat in steps:
        before = members_by_hand(report_log, now)
        now += gap
        gone = roll.pass_to(now)
        assert set(gone) == before - members_by_hand(report_log, now)
        assert len(gone) == len(set(gone))
        if seat is not None:
            roll.reported(seat)
            report_log.append((now, seat))
        assert set(roll.members) == members_by_hand(report_log, now)
        assert [seat in roll for seat in SEATS] == [seat in members_by_hand(report_log, now) for seat in SEATS]
        assert roll.fork().fingerprint() == roll.fingerprint()


def legs(effects: Any) -> list[Seat]:
    """Where legs are sent."""
    prefills = [("prefill", effect.engine) for effect in effects if isinstance(effect, DispatchPrefill)]
    decodes = [("decode", effect.engine) for effect in effects if isinstance(effect, (DispatchDecode, DispatchAlone))]
    return [*prefills, *decodes]  # type: ignore[list-item]


STEPS = st.one_of(
    st.tuples(st.just("report"), st.sampled_from(SEATS), st.sampled_from(["", "+1"])),
    st.tuples(st.just("arrive")),
    st.tuples(st.sampled_from(["answer", "fail"]), st.integers(0, 10)),
    st.tuples(st.just("break"), st.sampled_from(SEATS)),
    st.tuples(st.sampled_from(["leave", "join"]), st.sampled_from(SEATS)),
)


@settings(max_examples=300, derandomize=True, deadline=None)
@given(
    steps=st.lists(st.tuples(st.integers(0, 3), STEPS), max_size=50),
    policy=st.sampled_from(["round-robin", "least-loaded"]),
    dispatch=st.sampled_from(["sequential", "concurrent"]),
    options=st.sampled_from([{}, {"recomputes": True}, {"hedge_after_ns": 1000}]),
)
def test_only_members_get_legs_and_every_client_is_answered_once(
    governed: Make, answer: Make, steps: list[Any], policy: str, dispatch: str, options: dict[str, Any]
) -> None:
    it = governed(policy=policy, dispatch=dispatch, max_attempts=3, silence_ns=SILENCE, **options)
    report_log: list[tuple[int, Seat]] = []
    out: set[Seat] = set()
    at_work: dict[tuple[str, str], Any] = {}
    arrived, answered, now = 0, list[int](), 0

    def engine(seat: Seat) -> str:
        return str((it.prefill if seat[0] == "prefill" else it.decode)[seat[1]].engine)

    for gap, (what, *args) in steps:
        now += gap
        event: Any = None
        if what == "report":
            event = reports(args[0][0], args[0][1], args[1])
            report_log.append((now, args[0]))
        elif what == "arrive":
            event, arrived = RequestArrived(arrived), arrived + 1
        elif what in ("answer", "fail") and at_work:
            leg = at_work.pop(list(at_work)[args[0] % len(at_work)])
            event = DecodeEnded(leg.request_id, Code.NONE if what == "answer" else Code.IO)
            if isinstance(leg, DispatchPrefill):
                event = answer(leg) if what == "answer" else PrefillAnswered(leg.request_id, None, Code.IO)
        elif what == "break":
            event = EngineLost(engine(args[0]))
            at_work = {name: leg for name, leg in at_work.items() if (name[0], leg.engine) != args[0]}
        elif what in ("leave", "join"):
            event = (EngineLeaves if what == "leave" else EngineJoins)(engine(args[0]))
            (out.add if what == "leave" else out.discard)(args[0])
        if event is None:
            continue
        allowed = members_by_hand(report_log, now) - out
        effects = it.handle(event, now)
        assert set(legs(effects)) <= allowed
        for effect in effects:
            if isinstance(effect, (DispatchPrefill, DispatchDecode, DispatchAlone)):
                at_work[legs([effect])[0][0], effect.request_id] = effect
            elif isinstance(effect, Reply):
                answered.append(effect.request)
        up = {("prefill", i) for i, is_up in enumerate(it.prefill_choice.up) if is_up}
        assert up | {("decode", i) for i, is_up in enumerate(it.decode_choice.up) if is_up} == allowed
        assert it.fork().fingerprint() == it.fingerprint()
    assert len(answered) == len(set(answered))
    assert set(answered) | set(it.by_request) == set(range(arrived))


def test_nobody_is_a_member_who_has_not_reported(governed: Make) -> None:
    it = governed(silence_ns=SILENCE)
    assert it.handle(RequestArrived(0), 0) == (Reply(0, "failed", Code.UNREACHABLE, 0),)
    for seat in (("prefill", 1), ("decode", 0)):
        assert it.handle(reports(*seat), 1) == ()
    assert legs(it.handle(RequestArrived(1), 2)) == [("prefill", 1), ("decode", 0)]


def test_what_is_under_way_goes_on_where_somebody_falls_silent(governed: Make, answer: Make) -> None:
    it = governed(p=1, d=1, dispatch="sequential", silence_ns=SILENCE)
    for seat in (("prefill", 0), ("decode", 0)):
        it.handle(reports(*seat), 0)
    [first] = it.handle(RequestArrived(0), 1)
    it.handle(reports("decode", 0), 4)
    silent, second = it.handle(answer(first), 6)
    assert silent == EngineSilent("p-0")
    assert isinstance(second, DispatchDecode)
    assert it.handle(DecodeEnded(second.request_id), 7) == (Reply(0, "completed", Code.NONE, 1),)


def test_a_broken_connection_ends_its_legs_and_the_engine_stays_a_member(governed: Make) -> None:
    it = governed(p=2, d=1, max_attempts=2, silence_ns=SILENCE)
    for seat in (("prefill", 0), ("prefill", 1), ("decode", 0)):
        it.handle(reports(*seat), 0)
    assert legs(it.handle(RequestArrived(0), 0)) == [("prefill", 0), ("decode", 0)]
    assert legs(it.handle(EngineLost("p-0"), 1)) == [("prefill", 1), ("decode", 0)]
    assert legs(it.handle(RequestArrived(1), 2)) == [("prefill", 0), ("decode", 0)], "nobody has missed it yet"


def test_who_comes_back_under_another_id_is_known_by_it_at_once(governed: Make) -> None:
    it = governed(p=1, d=1, silence_ns=SILENCE)
    for seat in (("prefill", 0), ("decode", 0)):
        it.handle(reports(*seat), 0)
    it.handle(reports("prefill", 0, "+1"), 1)
    assert it.handle(RequestArrived(0), 1)[1].params.prefill.engine == "p-0+1"


def test_who_is_to_join_is_a_member_with_its_first_report(governed: Make) -> None:
    it = governed(p=2, d=1, silence_ns=SILENCE)
    it.handle(EngineLeaves("p-1"), 0)
    for seat in (("prefill", 0), ("decode", 0)):
        it.handle(reports(*seat), 0)
    it.handle(EngineJoins("p-1"), 1)
    assert it.prefill_choice.up == [True, False]
    it.handle(reports("prefill", 1), 2)
    assert it.prefill_choice.up == [True, True]


def test_a_new_incarnation_of_a_leaving_engine_stays_out(governed: Make) -> None:
    it = governed(p=2, d=1, silence_ns=SILENCE)
    for seat in SEATS[:3]:
        it.handle(reports(*seat), 0)
    it.handle(EngineLeaves("p-1"), 1)
    it.handle(reports("prefill", 1, "+1"), 2)
    assert it.prefill_choice.up == [True, False]
    it.handle(EngineJoins("p-1+1"), 3)
    assert it.prefill_choice.up == [True, True]


def test_without_the_rule_a_report_is_a_mistake(governed: Make) -> None:
    with pytest.raises(LocalProtocolError, match="p-0 reported"):
        governed().handle(reports("prefill", 0), 0)
