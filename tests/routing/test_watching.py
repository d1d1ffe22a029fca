"""Engines that stall: which silence is too long, and how a router comes back to an engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdflow.protocol.errors import LocalProtocolError
from pdflow.protocol.ids import EngineInfo, KvParams, Shards
from pdflow.protocol.messages import Code
from pdflow.protocol.values import S
from pdflow.routing.effects import AbortLeg, AskEngine, DispatchPrefill, EngineWatched, Reply
from pdflow.routing.events import (
    DecodeEnded,
    EngineChanged,
    EngineLost,
    EnginesChecked,
    FirstTokenDelivered,
    PrefillAnswered,
    RequestArrived,
)
from pdflow.routing.stalls import ENOUGH, FACTOR, GENERATION, LEAST, Awaited, StallRule, Usual
from pdflow.routing.watching import LONGEST_PAUSE

Make = Callable[..., Any]
RULE = StallRule(check_ns=1, least=2)
LEARNS = StallRule(check_ns=S, learns=True)


def checked(
    router: Any, *active: str, responding: tuple[str, ...] = (), idle: tuple[str, ...] = (), times: int = 1
) -> list[Any]:
    """Check engines, and return the effects of the last check that has any, but for what is asked."""
    effects: list[Any] = []
    for _ in range(times):
        made = router.handle(EnginesChecked(active, responding, idle), 0)
        effects = [effect for effect in made if not isinstance(effect, AskEngine)] or effects
    return effects


def asked(router: Any, *active: str, responding: tuple[str, ...] = ()) -> list[str]:
    """Check engines, and return those that are asked whether they respond."""
    made = router.handle(EnginesChecked(active, responding), 0)
    return [effect.engine for effect in made if isinstance(effect, AskEngine)]


def states(effects: list[Any]) -> list[tuple[str, str]]:
    return [(effect.engine, effect.state) for effect in effects if isinstance(effect, EngineWatched)]


def answered(request_id: str, engine: int = 0) -> PrefillAnswered:
    params = KvParams(EngineInfo(f"p-{engine}", Shards(1, 1, 16)), "x" + request_id[1:], request_id, 5)
    return PrefillAnswered(request_id, params)


def serve(router: Any, request: int, tokens: int = 10, p_checks: int = 0) -> None:
    """Serve a request without a fault, P's answer coming after so many silent checks."""
    (leg,) = router.handle(RequestArrived(request, prompt_tokens=tokens), 0)
    checked(router, times=p_checks)
    router.handle(answered(leg.request_id, leg.engine), 0)
    router.handle(FirstTokenDelivered(request, leg.request_id), 0)
    assert isinstance(router.handle(DecodeEnded(leg.request_id), 0)[-1], Reply)


def test_a_request_is_sent_to_another_engine_when_its_own_is_silent_for_too_long(governed: Make) -> None:
    router = governed(dispatch="sequential", max_attempts=2, stall=RULE)
    router.handle(RequestArrived(0), 0)
    assert not checked(router, times=2)
    effects = checked(router)
    assert states(effects) == [("p-0", "stalled")]
    abort, leg = effects[1:]
    assert (abort, leg.engine) == (AbortLeg("prefill", 0, "r0.1"), 1)
    (leg,) = router.handle(RequestArrived(1), 0)
    assert leg.engine == 1, "the stalled one gets none"


def test_an_engine_that_sends_anything_is_at_work(governed: Make) -> None:
    router = governed(dispatch="sequential", max_attempts=2, stall=RULE)
    router.handle(RequestArrived(0), 0)
    for _ in range(10):
        assert not checked(router, times=2)
        assert not checked(router, "p-0")


def test_the_last_attempt_waits(governed: Make) -> None:
    router = governed(dispatch="sequential", max_attempts=2, stall=RULE)
    router.handle(RequestArrived(0), 0)
    checked(router, times=3)
    assert states(checked(router, "p-0", times=1)) == [("p-0", "answers")]
    effects = checked(router, times=3)
    assert states(effects) == [("p-1", "stalled")]
    assert not [effect for effect in effects if not isinstance(effect, EngineWatched)]
    assert router.attempts.keys() == {"r0.2"}


def test_a_stalled_engine_is_tried_with_one_leg_at_a_time_and_pauses_grow(governed: Make) -> None:
    router = governed(dispatch="sequential", max_attempts=2, policy="least-loaded", stall=RULE)
    router.handle(RequestArrived(0), 0)
    checked(router, times=3)
    pause, number = 3, 1
    for _ in range(6):
        assert not states(checked(router, "p-1", times=pause - 1))
        assert states(checked(router, "p-1")) == [("p-0", "trial")]
        legs = []
        for _ in range(2):
            legs += [e for e in router.handle(RequestArrived(number), 0) if isinstance(e, DispatchPrefill)]
            number += 1
        assert [leg.engine for leg in legs] == [0, 1], "the least loaded one, once"
        assert states(checked(router, "p-1", times=3)) == [("p-0", "stalled")]
        pause = min(2 * pause, LONGEST_PAUSE)
    assert pause == LONGEST_PAUSE


def test_an_engine_that_answers_on_trial_is_like_any_other(governed: Make) -> None:
    router = governed(dispatch="sequential", max_attempts=2, policy="least-loaded", stall=RULE)
    router.handle(RequestArrived(0), 0)
    checked(router, times=3)
    checked(router, "p-1", times=3)
    (leg,) = router.handle(RequestArrived(1), 0)
    assert leg.engine == 0
    assert router.prefill_choice.up == [False, True]
    assert states(checked(router, "p-0", "p-1")) == [("p-0", "answers")]
    assert router.prefill_choice.up == [True, True]


def test_when_the_others_are_down_a_stalled_engine_gets_legs_at_once(governed: Make) -> None:
    router = governed(dispatch="sequential", max_attempts=2, stall=RULE)
    router.handle(RequestArrived(0), 0)
    checked(router, times=3)
    effects = router.handle(EngineChanged("p-1", False), 0)
    assert states(effects) == [("p-0", "answers")]
    assert router.prefill_choice.up == [True, False]


def test_a_resumed_stream_leaves_a_stalled_decode_engine(governed: Make) -> None:
    router = governed(dispatch="sequential", max_attempts=2, stall=RULE, resumes=True)
    router.handle(RequestArrived(0), 0)
    router.handle(answered("r0.1"), 0)
    router.handle(FirstTokenDelivered(0, "r0.1"), 0)
    assert states(checked(router, times=3)) == [("d-0", "stalled")]
    assert router.attempts.keys() == {"r0.2"}


def test_the_limit_is_what_was_usual(governed: Make) -> None:
    router = governed(dispatch="sequential", max_attempts=2, stall=LEARNS)
    router.handle(RequestArrived(0, prompt_tokens=10), 0)
    assert not checked(router, times=1000), "nothing is usual yet"
    router = governed(dispatch="sequential", max_attempts=2, stall=LEARNS)
    for request in range(ENOUGH):
        serve(router, request, p_checks=3 if request == 5 else 0)
    router.handle(RequestArrived(100, prompt_tokens=10), 0)
    assert not checked(router, times=FACTOR * 3)
    assert states(checked(router)) == [("p-0", "stalled")]


def test_a_long_prompt_has_more_time(governed: Make) -> None:
    router = governed(dispatch="sequential", max_attempts=2, stall=LEARNS)
    for request in range(ENOUGH):
        serve(router, request, tokens=100, p_checks=2)
    router.handle(RequestArrived(100, prompt_tokens=1000), 0)
    assert not checked(router, times=FACTOR * 2 * 10)
    assert states(checked(router)) == [("p-0", "stalled")]


def decoding(router: Any, request: int, streams: bool = False) -> None:
    """Let a request reach d-0, or the next one."""
    (leg,) = router.handle(RequestArrived(request, prompt_tokens=10, streams=streams), 0)
    router.handle(answered(leg.request_id, leg.engine), 0)


def test_a_whole_answer_may_take_any_time_while_its_engine_responds(governed: Make) -> None:
    router = governed(dispatch="sequential", max_attempts=2, stall=RULE)
    decoding(router, 0)
    assert asked(router) == ["d-0"]
    for _ in range(20):
        assert not asked(router, responding=("d-0",)), "it was silent at no check"
        assert asked(router) == ["d-0"]
        assert asked(router) == ["d-0"]
    assert not router.stalled


def test_a_whole_answer_leaves_an_engine_that_responds_and_runs_no_step(governed: Make) -> None:
    """Its GPU hangs, or it waits for KV that does not come."""
    router = governed(dispatch="sequential", max_attempts=2, stall=RULE)
    decoding(router, 0)
    for _ in range(5):
        assert not checked(router, responding=("d-0",), idle=("d-0",), times=2)
        assert not checked(router, responding=("d-0",)), "it has run a step"
    assert not checked(router, responding=("d-0",), idle=("d-0",), times=2)
    assert states(checked(router, responding=("d-0",), idle=("d-0",))) == [("d-0", "stalled")]
    assert router.attempts.keys() == {"r0.2"}
    assert router.stalled["decode", 0].responds, "so a response alone does not end its stall"


@pytest.mark.parametrize("alone", [False, True])
def test_a_stream_behind_whole_answers_waits_while_its_engine_responds(governed: Make, alone: bool) -> None:
    """An engine that runs nothing but whole answers sends nothing to a stream in its queue."""
    options = {"aggregated": frozenset({0, 1})} if alone else {"d": 2}
    router = governed(dispatch="sequential", max_attempts=2, stall=RULE, **options)
    engine = "p-0" if alone else "d-0"
    for request, streams in ((0, False), (1, True), (2, True)):
        if alone:
            router.handle(RequestArrived(request, streams=streams), 0)
        else:
            decoding(router, request, streams)
    other = engine[0] + "-1"
    assert not checked(router, other, responding=(engine,), times=20)
    assert not checked(router, other, times=2)
    assert states(checked(router, other)) == [(engine, "stalled")]
    assert router.attempts.keys() == {"r0.2", "r1.1", "r2.2"}


@pytest.mark.parametrize("alone", [False, True])
def test_whole_answers_leave_an_engine_that_does_not_respond(governed: Make, alone: bool) -> None:
    options = {"aggregated": frozenset({0, 1})} if alone else {}
    router = governed(dispatch="sequential", max_attempts=2, stall=RULE, **options)
    silent = "p-0" if alone else "d-0"
    if alone:
        router.handle(RequestArrived(0, streams=False), 0)
    else:
        decoding(router, 0)
    assert not checked(router, times=2)
    assert states(checked(router)) == [(silent, "stalled")]
    assert router.attempts.keys() == {"r0.2"}


def test_an_answer_of_one_token_takes_no_longer_than_its_prompt(governed: Make) -> None:
    """P's is the whole answer of a client that does not stream, and no response stands for it."""
    router = governed(dispatch="sequential", max_attempts=2, stall=RULE)
    router.handle(RequestArrived(0, prefill_only=True, streams=False), 0)
    assert states(checked(router, responding=("p-0",), times=3)) == [("p-0", "stalled")]


def test_a_whole_answer_is_no_trial_of_an_aggregated_engine(governed: Make) -> None:
    router = governed(policy="least-loaded", max_attempts=2, stall=RULE, aggregated=frozenset({0, 1}))
    hung(router)
    for request, streams, engine in ((1, False, 1), (2, True, 0)):
        legs = router.handle(RequestArrived(request, streams=streams), 0)
        assert [leg.engine for leg in legs] == [engine]


def test_an_engine_that_was_stopped_gets_legs_when_it_responds(governed: Make) -> None:
    router = governed(dispatch="sequential", max_attempts=2, stall=RULE)
    decoding(router, 0)
    checked(router, times=3)
    assert asked(router, "p-1", "d-1") == ["d-0"], "nobody waits for it"
    assert states(checked(router, "p-1", "d-1", responding=("d-0",))) == [("d-0", "answers")]
    assert router.decode_choice.up == [True, True]
    assert not asked(router, "p-1", "d-1")


def test_a_stream_that_could_not_leave_a_stopped_engine_waits_anew_when_it_responds(governed: Make) -> None:
    router = governed(dispatch="sequential", max_attempts=2, stall=RULE)
    decoding(router, 0, streams=True)
    router.handle(FirstTokenDelivered(0, "r0.1"), 0)
    assert states(checked(router, times=3)) == [("d-0", "stalled")]
    assert states(checked(router, responding=("d-0",))) == [("d-0", "answers")]
    assert not checked(router, times=2)
    assert states(checked(router)) == [("d-0", "stalled")]


def test_an_engine_that_responds_while_its_gpu_hangs_is_stalled(governed: Make) -> None:
    """Streams that have begun show it. Whole answers leave it with them, and no response ends its stall."""
    router = governed(dispatch="sequential", max_attempts=2, policy="least-loaded", d=2, stall=RULE, resumes=True)
    decoding(router, 0, streams=True)
    router.handle(FirstTokenDelivered(0, "r0.1"), 0)
    router.decode_choice.up[1] = False
    decoding(router, 1)
    router.decode_choice.up[1] = True
    assert not checked(router, responding=("d-0",), times=2)
    assert states(checked(router, responding=("d-0",))) == [("d-0", "stalled")]
    assert router.attempts.keys() == {"r0.2", "r1.2"}
    assert states(checked(router, "p-0", "p-1", "d-1", responding=("d-0",), times=10)) == [("d-0", "trial")]


@pytest.mark.parametrize("check", [0, 1, 2])
def test_one_response_shows_that_a_silent_engine_was_not_stopped(governed: Make, check: int) -> None:
    """It may take longer than a check to respond while its GPU hangs."""
    router = governed(dispatch="sequential", max_attempts=2, stall=RULE, resumes=True)
    decoding(router, 0, streams=True)
    for number in range(3):
        effects = checked(router, responding=("d-0",) if number == check else ())
    assert states(effects) == [("d-0", "stalled")]
    assert states(checked(router, "p-0", "p-1", "d-1", responding=("d-0",), times=3)) == [("d-0", "trial")]


def test_the_limit_of_whole_answers_is_what_was_usual(governed: Make) -> None:
    router = governed(d=1, p=1, dispatch="sequential", max_attempts=2, stall=LEARNS)
    for request in range(ENOUGH):
        decoding(router, request)
        checked(router, times=3 if request == 5 else 0)
        assert isinstance(router.handle(DecodeEnded(f"r{request}.1"), 0)[-1], Reply)
    assert router.usual[Awaited.WHOLE].limit(LEARNS, 0) == FACTOR * 3


def hung(router: Any, responding: tuple[str, ...] = ()) -> None:
    """Let p-0 stall, and be on trial."""
    router.handle(RequestArrived(0), 0)
    checked(router, responding=responding, times=3)
    checked(router, "p-1", times=3)
    assert router.stalled[("prefill", 0)].left == 0


def test_retries_are_no_trials(governed: Make) -> None:
    """The engine may hang still, and a retry may be the last attempt of its request, which waits wherever it is."""
    router = governed(dispatch="sequential", max_attempts=2, policy="least-loaded", stall=RULE)
    hung(router)
    (leg,) = router.handle(RequestArrived(1), 0)
    assert leg.engine == 0
    router.handle(PrefillAnswered(leg.request_id, None, Code.IO), 0)
    (leg,) = router.handle(RequestArrived(2), 0)
    assert leg.engine == 0, "it has none now"
    (leg,) = router.handle(RequestArrived(3), 0)
    effects = router.handle(PrefillAnswered(leg.request_id, None, Code.IO), 0)
    assert [effect.engine for effect in effects if isinstance(effect, DispatchPrefill)] == [1]


def test_a_lost_engine_s_requests_are_no_trials(governed: Make) -> None:
    router = governed(p=3, dispatch="sequential", max_attempts=3, policy="least-loaded", stall=RULE)
    router.handle(RequestArrived(0), 0)
    checked(router, "p-1", "p-2", times=3)
    checked(router, "p-1", "p-2", times=3)
    for request in range(1, 8):
        router.handle(RequestArrived(request), 0)
    effects = router.handle(EngineLost("p-1"), 0)
    assert {effect.engine for effect in effects if isinstance(effect, DispatchPrefill)} == {2}


def test_a_whole_answer_is_no_trial_of_a_decode_engine(governed: Make) -> None:
    router = governed(dispatch="sequential", max_attempts=2, policy="least-loaded", stall=RULE, resumes=True)
    for request_id, engine in (("r0.1", 0),):
        router.handle(RequestArrived(0), 0)
        router.handle(answered(request_id, engine), 0)
    checked(router, "p-0", "p-1", times=3)
    checked(router, "p-0", "p-1", "d-1", times=3)
    assert router.stalled[("decode", 0)].left == 0
    for request, streams, engine in ((1, False, 1), (2, True, 0)):
        (leg,) = router.handle(RequestArrived(request, streams=streams), 0)
        (leg,) = router.handle(answered(leg.request_id, leg.engine), 0)
        assert leg.engine == engine


def tried_with_a_whole_answer(router: Any) -> None:
    """Let p-0, which is on trial and responds, get a whole answer, since no stream comes for a pause."""
    hung(router, ("p-0",))
    assert not checked(router, "p-1", responding=("p-0",), times=2)
    (leg,) = router.handle(RequestArrived(100, streams=False), 0)
    assert leg.engine == 1, "a stream may still come"
    assert not checked(router, "p-1", responding=("p-0",))
    (leg,) = router.handle(RequestArrived(101, streams=False), 0)
    assert leg.engine == 0
    (leg,) = router.handle(RequestArrived(102, streams=False), 0)
    assert leg.engine == 1, "one at a time"


def test_if_no_stream_comes_a_whole_answer_is_a_trial(governed: Make) -> None:
    router = governed(policy="least-loaded", max_attempts=2, stall=RULE, aggregated=frozenset({0, 1}))
    tried_with_a_whole_answer(router)
    router.handle(PrefillAnswered("r101.1", answered("r101.1").params), 0)
    assert states(checked(router, "p-0", "p-1")) == [("p-0", "answers")]


def test_a_whole_answer_on_trial_has_as_long_as_the_pause(governed: Make) -> None:
    """The GPU hangs still, and no response ends the trial."""
    router = governed(policy="least-loaded", max_attempts=2, stall=RULE, aggregated=frozenset({0, 1}))
    tried_with_a_whole_answer(router)
    pause = router.stalled[("prefill", 0)].pause
    assert not checked(router, "p-1", responding=("p-0",), times=pause)
    assert states(checked(router, "p-1", responding=("p-0",))) == [("p-0", "stalled")]
    assert router.stalled[("prefill", 0)].pause == 2 * pause
    assert "r101.2" in router.attempts


@pytest.mark.parametrize("resumable", [False, True])
def test_an_answer_that_cannot_be_resumed_waits(governed: Make, resumable: bool) -> None:
    router = governed(dispatch="sequential", max_attempts=2, stall=RULE, resumes=True)
    router.handle(RequestArrived(0, resumable=resumable), 0)
    router.handle(answered("r0.1"), 0)
    router.handle(FirstTokenDelivered(0, "r0.1"), 0)
    assert states(checked(router, times=3)) == [("d-0", "stalled")]
    assert router.attempts.keys() == {"r0.2" if resumable else "r0.1"}


def test_if_most_engines_are_silent_none_stalls(governed: Make) -> None:
    router = governed(p=4, dispatch="sequential", max_attempts=2, stall=RULE)
    for request in range(4):
        router.handle(RequestArrived(request), 0)
    assert not checked(router, "p-3", times=5), "three of four"
    assert states(checked(router, "p-2", "p-3", times=1)) == [("p-0", "stalled"), ("p-1", "stalled")]


def test_a_first_token_before_p_s_answer_begins_the_wait_for_the_next(governed: Make) -> None:
    router = governed(dispatch="concurrent", stall=RULE, max_attempts=2)
    router.handle(RequestArrived(0), 0)
    router.handle(FirstTokenDelivered(0, "r0.1"), 0)
    assert router.waits["r0.1"].awaited is Awaited.PROMPT
    router.handle(answered("r0.1"), 0)
    assert router.waits["r0.1"].awaited is Awaited.NEXT


def test_a_survived_stall_teaches_nothing(governed: Make) -> None:
    router = governed(dispatch="sequential", max_attempts=2, stall=LEARNS)
    for request in range(ENOUGH):
        serve(router, request)
    (leg,) = router.handle(RequestArrived(100, prompt_tokens=10), 0)
    router.handle(PrefillAnswered(leg.request_id, None, Code.IO), 0)
    before = router.usual[Awaited.PROMPT].limit(LEARNS, 10)
    assert len(states(checked(router, times=200))) == 1
    router.handle(answered("r100.2", 1), 0)
    assert router.usual[Awaited.PROMPT].limit(LEARNS, 10) == before


@pytest.mark.parametrize("d", [1, 2])
def test_an_outage_teaches_nothing(governed: Make, d: int) -> None:
    """All engines are silent, so none stalls; and their answers end well at last."""
    router = governed(p=1, d=d, dispatch="sequential", max_attempts=2, stall=LEARNS)
    for request in range(ENOUGH):
        serve(router, request)
    for request in range(100, 102):
        decoding(router, request, streams=True)
        router.handle(FirstTokenDelivered(request, f"r{request}.1"), 0)
    for _ in range(ENOUGH):
        router.usual[Awaited.NEXT].observe(0, 0)
    before = router.usual[Awaited.NEXT].limit(LEARNS, 0)
    assert not checked(router, times=50)
    for request in range(100, 102):
        router.handle(DecodeEnded(f"r{request}.1"), 0)
    assert router.usual[Awaited.NEXT].limit(LEARNS, 0) == before


def test_prompts_that_were_in_a_cache_do_not_shorten_the_limit_of_others() -> None:
    usual = Usual()
    for _ in range(ENOUGH):
        usual.observe(0, 100_000)
    limit = usual.limit(LEARNS, 100_000)
    assert limit is not None
    assert limit * LEARNS.check_ns >= 50 * S


@pytest.mark.parametrize("code", [Code.IO, Code.UNREACHABLE])
def test_a_wait_that_ended_badly_teaches_nothing(governed: Make, code: Code) -> None:
    router = governed(dispatch="sequential", stall=LEARNS)
    (leg,) = router.handle(RequestArrived(0), 0)
    router.handle(PrefillAnswered(leg.request_id, None, code), 0)
    assert router.usual[Awaited.PROMPT].known == 0


def test_checks_without_a_rule_are_an_error(governed: Make) -> None:
    with pytest.raises(LocalProtocolError, match="does not watch"):
        governed(hedge_after_ns=1).handle(EnginesChecked(()), 0)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 10_000)), min_size=ENOUGH, max_size=400))
def test_no_silence_of_the_last_waits_is_too_long(waits: list[tuple[int, int]]) -> None:
    usual = Usual()
    for checks, tokens in waits:
        usual.observe(checks, tokens)
    for checks, tokens in waits[-GENERATION:]:
        limit = usual.limit(LEARNS, tokens)
        assert limit is not None
        assert limit >= max(LEAST, FACTOR * checks)


def test_a_silence_is_forgotten_after_two_generations() -> None:
    usual = Usual()
    usual.observe(50, 0)
    for _ in range(2 * GENERATION + ENOUGH):
        usual.observe(0, 0)
    assert usual.limit(LEARNS, 0) == LEAST
