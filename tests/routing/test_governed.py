"""Rules beside the policies: who is turned away, which prompts stay with D, what a failure leads to, who is leaving."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pdflow.protocol.errors import LocalProtocolError
from pdflow.protocol.ids import EngineInfo, Shards
from pdflow.protocol.messages import Code
from pdflow.routing.admission import AdmissionLimits
from pdflow.routing.conditional import Disaggregation
from pdflow.routing.effects import AbortLeg, DispatchAlone, DispatchDecode, DispatchPrefill, EngineLeft, Reply
from pdflow.routing.events import (
    ClientGone,
    DecodeEnded,
    EngineChanged,
    EngineJoins,
    EngineLeaves,
    EngineLost,
    PrefillAnswered,
    RequestArrived,
)
from pdflow.routing.governed import GovernedRouter, Rules
from pdflow.routing.policy import Choice
from pdflow.routing.prefix_aware import PrefixAware

Make = Callable[..., Any]
FAILED = {"recomputes": True, "max_attempts": 2}


def arrives(request: int, tokens: int = 0, **more: Any) -> RequestArrived:
    return RequestArrived(request, prompt_tokens=tokens, **more)


def kinds(effects: Any) -> list[type]:
    return [type(effect) for effect in effects]


# Admission.


def test_no_more_are_in_flight_than_may_be(governed: Make) -> None:
    it = governed(admission=AdmissionLimits(max_inflight=2))
    for request in range(2):
        it.handle(arrives(request), 0)
    assert it.handle(arrives(2), 0) == (Reply(2, "failed", Code.REJECTED, 0, "shed: too many requests in flight"),)
    it.handle(ClientGone(0), 0)
    assert kinds(it.handle(arrives(3), 0)) == [DispatchPrefill, DispatchDecode]


def test_the_queue_of_prompts_is_bounded_for_each_engine_that_is_up(governed: Make, answer: Make) -> None:
    it = governed(admission=AdmissionLimits(max_queue_tokens=100))
    (first, *_) = it.handle(arrives(0, 150), 0)
    it.handle(arrives(1, 50), 0)
    shed = it.handle(arrives(2, 1), 0)
    assert shed == (Reply(2, "failed", Code.REJECTED, 0, "shed: too many prompt tokens in the queue"),)
    it.handle(answer(first), 0)
    assert kinds(it.handle(arrives(3, 150), 0)) == [DispatchPrefill, DispatchDecode]
    it.handle(EngineChanged("p-1", False), 0)
    assert kinds(it.handle(arrives(4, 1), 0)) == [Reply]


def test_a_prompt_that_is_longer_than_the_bound_is_served_when_nobody_waits(governed: Make) -> None:
    it = governed(admission=AdmissionLimits(max_queue_tokens=10))
    assert kinds(it.handle(arrives(0, 1000), 0)) == [DispatchPrefill, DispatchDecode]
    assert kinds(it.handle(arrives(1, 1), 0)) == [Reply]


def test_a_prompt_that_stays_with_d_is_in_no_queue_of_ps(governed: Make) -> None:
    it = governed(admission=AdmissionLimits(max_queue_tokens=10), disaggregation=Disaggregation(((50,), (50,))))
    it.handle(arrives(0, 1000), 0)
    assert kinds(it.handle(arrives(1, 51), 0)) == [Reply]
    assert kinds(it.handle(arrives(2, 50), 0)) == [DispatchAlone]


def test_a_retry_is_not_shed(governed: Make) -> None:
    it = governed(admission=AdmissionLimits(max_inflight=1), max_attempts=2)
    it.handle(arrives(0), 0)
    assert kinds(it.handle(DecodeEnded("r0.1", Code.IO), 0))[-2:] == [DispatchPrefill, DispatchDecode]


def test_a_request_arrives_once_whether_or_not_there_is_room(governed: Make) -> None:
    it = governed(admission=AdmissionLimits(max_inflight=1))
    it.handle(arrives(0), 0)
    with pytest.raises(LocalProtocolError):
        it.handle(arrives(0), 0)


# Prompts of D's own.


@pytest.mark.parametrize("dispatch", ["sequential", "concurrent"])
def test_short_prompts_stay_with_d(governed: Make, dispatch: Any) -> None:
    it = governed(disaggregation=Disaggregation(((100,), (100,))), dispatch=dispatch)
    assert it.handle(arrives(0, 100), 0) == (DispatchAlone(0, 0, "r0.1"),)
    assert kinds(it.handle(arrives(1, 101), 0))[0] is DispatchPrefill
    assert it.handle(DecodeEnded("r0.1"), 0) == (Reply(0, "completed", Code.NONE, 1),)


def test_the_threshold_is_that_of_the_engine_whose_turn_it_is_and_of_what_is_open_there(governed: Make) -> None:
    it = governed(disaggregation=Disaggregation(((100, 50), (10,))))
    assert it.handle(arrives(0, 100), 0) == (DispatchAlone(0, 0, "r0.1"),)
    assert kinds(it.handle(arrives(1, 100), 0)) == [DispatchPrefill, DispatchDecode]
    assert kinds(it.handle(arrives(2, 100), 0)) == [DispatchPrefill, DispatchDecode]
    assert kinds(it.handle(arrives(3, 10), 0)) == [DispatchAlone]
    assert it.handle(arrives(4, 50), 0) == (DispatchAlone(0, 4, "r4.1"),), "of two open legs as of one"


def test_what_d_has_already_does_not_count() -> None:
    p, d = (tuple(EngineInfo(f"{role}-{i}", Shards(1, 1, 16)) for i in range(2)) for role in "pd")
    choices = Choice("round-robin", 2), PrefixAware((100, 100), 10)
    rule = Disaggregation(((30,), (30,)))
    it = GovernedRouter(p, d, "concurrent", choices, Rules(disaggregation=rule))
    assert kinds(it.handle(arrives(0, 105, prefix=tuple(range(10))), 0)) == [DispatchPrefill, DispatchDecode]
    it.handle(DecodeEnded("r0.1"), 0)
    assert it.handle(arrives(1, 129, prefix=tuple(range(10))), 0) == (DispatchAlone(0, 1, "r1.1"),)


def test_a_prompt_that_stays_needs_no_prefill_engine(governed: Make) -> None:
    it = governed(disaggregation=Disaggregation(((100,), (100,))), p=1, max_attempts=2)
    it.handle(EngineChanged("p-0", False), 0)
    assert kinds(it.handle(arrives(0, 100), 0)) == [DispatchAlone]
    assert it.handle(arrives(1, 101), 0) == (Reply(1, "failed", Code.UNREACHABLE, 0),)
    assert it.handle(EngineLost("d-0"), 0) == (AbortLeg("decode", 0, "r0.1"), DispatchAlone(1, 0, "r0.2"))
    assert it.handle(EngineLost("d-1"), 0)[-1] == Reply(0, "failed", Code.PEER_DEAD, 2)


# After a failure.


def test_d_recomputes_what_p_did_not_deliver(governed: Make) -> None:
    it = governed(**FAILED, policy="least-loaded")
    it.handle(arrives(0), 0)
    assert it.handle(PrefillAnswered("r0.1", None, Code.PREFILL_ABORTED), 0) == (
        AbortLeg("decode", 0, "r0.1"),
        DispatchAlone(0, 0, "r0.2"),
    ), "D is not to blame"
    assert it.handle(DecodeEnded("r0.2", Code.IO), 0) == (Reply(0, "failed", Code.IO, 2),)


def test_and_another_d_if_that_failed(governed: Make) -> None:
    it = governed(**FAILED, policy="least-loaded")
    it.handle(arrives(0), 0)
    effects = it.handle(DecodeEnded("r0.1", Code.STALLED), 0)
    assert effects == (AbortLeg("prefill", 0, "r0.1"), DispatchAlone(1, 0, "r0.2"))
    assert it.handle(DecodeEnded("r0.2"), 0) == (Reply(0, "completed", Code.NONE, 2),)


def test_where_failures_are_recomputed_no_prefill_engine_is_no_failure(governed: Make) -> None:
    it = governed(**FAILED, p=1)
    it.handle(arrives(0), 0)
    effects = it.handle(EngineLost("p-0"), 0)
    assert effects[-1] == DispatchAlone(1, 0, "r0.2")
    assert it.handle(arrives(1), 0) == (DispatchAlone(0, 1, "r1.1"),)


def test_nobody_is_left_to_recompute(governed: Make) -> None:
    it = governed(**FAILED, d=1)
    it.handle(arrives(0), 0)
    assert it.handle(EngineLost("d-0"), 0)[-1] == Reply(0, "failed", Code.UNREACHABLE, 1)


def test_an_engine_that_does_both_is_tried_again_elsewhere(governed: Make) -> None:
    it = governed(**FAILED, p=2, d=0, aggregated=frozenset({0, 1}))
    it.handle(arrives(0), 0)
    assert it.handle(EngineLost("p-0"), 0) == (
        AbortLeg("prefill", 0, "r0.1"),
        DispatchPrefill(1, 0, "r0.2", "x0.2", False),
    )


# Engines that leave.


def test_a_decode_engine_leaves_when_its_last_leg_ends(governed: Make) -> None:
    it = governed()
    it.handle(arrives(0), 0)
    assert it.handle(EngineLeaves("d-0"), 0) == ()
    for request in (1, 2):
        assert it.handle(arrives(request), 0)[1].engine == 1
    assert it.handle(DecodeEnded("r0.1"), 0)[-1] == EngineLeft("d-0")
    assert it.handle(DecodeEnded("r1.1"), 0)[-1] != EngineLeft("d-0"), "it leaves once"


def test_a_prefill_engine_stays_until_its_kv_has_been_fetched(governed: Make, answer: Make) -> None:
    it = governed(dispatch="sequential")
    (leg,) = it.handle(arrives(0), 0)
    assert it.handle(EngineLeaves("p-0"), 0) == ()
    assert kinds(it.handle(answer(leg), 0)) == [DispatchDecode]
    assert it.handle(DecodeEnded("r0.1"), 0) == (Reply(0, "completed", Code.NONE, 1), EngineLeft("p-0"))


def test_an_engine_that_nobody_uses_leaves_at_once(governed: Make) -> None:
    it = governed()
    assert it.handle(EngineLeaves("p-1"), 0) == (EngineLeft("p-1"),)
    assert it.handle(EngineLeaves("p-1"), 0) == ()


def test_a_lost_engine_has_left(governed: Make) -> None:
    it = governed()
    it.handle(arrives(0), 0)
    it.handle(EngineLeaves("p-0"), 0)
    assert it.handle(EngineLost("p-0"), 0)[-1] == EngineLeft("p-0")


@pytest.mark.parametrize("busy", [True, False])
def test_who_leaves_stays_out_until_it_joins(governed: Make, busy: bool) -> None:
    it = governed()
    if busy:
        it.handle(arrives(9), 0)
    it.handle(EngineLeaves("p-0"), 0)
    it.handle(EngineChanged("p-0", True, EngineInfo("p-0+1", Shards(1, 1, 16))), 0)
    assert {it.handle(arrives(request), 0)[0].engine for request in range(4)} == {1}
    it.handle(EngineJoins("p-0+1"), 0)
    assert {it.handle(arrives(request), 0)[0].engine for request in range(4, 8)} == {0, 1}
    assert EngineLeft not in kinds(it.handle(ClientGone(9), 0))
