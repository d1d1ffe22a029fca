"""One client's answer: one attempt streams it, whatever the others bring, and P's first token is told once to each
decode leg that awaits it. By hand, and with the router's endpoint in any order of events: a report waits in a queue, as
it does live, and legs that were taken back may answer once more.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from random import Random
from typing import Any, Literal

import attrs
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdflow.protocol.errors import LocalProtocolError
from pdflow.protocol.events import TimeReached
from pdflow.protocol.ids import EngineInfo, KvParams, Shards
from pdflow.protocol.messages import Code
from pdflow.routing.answer import Answer, Ending, FirstTokenUse, PieceUse
from pdflow.routing.conditional import Disaggregation
from pdflow.routing.effects import AbortLeg, DispatchAlone, DispatchDecode, DispatchPrefill, Reply
from pdflow.routing.events import (
    ClientGone,
    DecodeEnded,
    EngineChanged,
    EngineLost,
    FirstTokenDelivered,
    PrefillAnswered,
    RequestArrived,
)
from pdflow.routing.governed import Rules
from pdflow.routing.hedging import HedgingRouter
from pdflow.routing.policy import Choice

A, B, C = "r0.1", "r0.2", "r0.3"


def streamed(first_from_prefill: bool = False) -> Answer:
    return Answer(True, first_from_prefill)


def test_the_first_attempt_that_answers_streams_and_the_other_is_dropped() -> None:
    it = streamed()
    assert it.is_candidate(A)
    assert it.is_candidate(B)
    assert [it.piece_arrived(attempt) for attempt in (B, A, B, A)] == [
        PieceUse.FIRST,
        PieceUse.DROP,
        PieceUse.PASS,
        PieceUse.DROP,
    ]
    assert it.is_candidate(B)
    assert not it.is_candidate(A)


def test_an_attempt_that_streamed_stays_the_one_when_its_leg_has_failed() -> None:
    """Another attempt would start the answer again."""
    it = streamed()
    it.piece_arrived(A)
    it.leg_ended("decode", A)
    assert it.piece_arrived(B) is PieceUse.DROP
    assert it.ended("failed") is Ending.BREAK_OFF


@pytest.mark.parametrize("outcome", ["completed", "failed", "cancelled"])
def test_nothing_follows_the_end(outcome: Any) -> None:
    it = streamed(first_from_prefill=True)
    ending = it.ended(outcome)
    assert ending is (Ending.ERROR if outcome == "failed" else Ending.NOTHING)
    assert it.piece_arrived(A) is PieceUse.DROP
    assert it.first_token_received(A, False) is None
    assert not it.decode_dispatched(A)


def test_nothing_follows_a_whole_answer() -> None:
    it = streamed()
    it.piece_arrived(A)
    it.whole(A)
    assert it.piece_arrived(A) is it.piece_arrived(B) is PieceUse.DROP
    assert not it.is_candidate(A)


def test_only_the_attempt_that_streams_has_a_whole_answer() -> None:
    it = streamed()
    it.piece_arrived(A)
    before = it.fingerprint()
    with pytest.raises(LocalProtocolError):
        it.whole(B)
    assert it.fingerprint() == before


def test_decode_legs_that_were_dispatched_without_ps_token_receive_it() -> None:
    """Of a hedge, too: both go on behind it. One that has ended is not told, and a later one is dispatched with it."""
    it = streamed(first_from_prefill=True)
    assert it.prefill_dispatched()
    assert it.decode_dispatched(A)
    assert it.decode_dispatched(B)
    assert it.decode_dispatched(C)
    it.leg_ended("decode", B)
    it.leg_ended("prefill", C)
    assert it.first_token_received(A, False) == FirstTokenUse((A, C), ())
    assert it.first_token_received(C, False) is None, "the answer starts with the other P's"
    assert not it.prefill_dispatched()
    assert not it.decode_dispatched("r0.4")


def test_without_that_nobody_awaits_anything() -> None:
    it = streamed()
    assert not it.prefill_dispatched()
    assert not it.decode_dispatched(A)
    assert not it.alone_dispatched(B)
    with pytest.raises(LocalProtocolError):
        it.first_token_received(A, False)
    assert it.piece_arrived(B) is PieceUse.FIRST


def test_an_answer_that_ends_with_ps_token_is_whole() -> None:
    it = streamed(first_from_prefill=True)
    it.decode_dispatched(A)
    assert it.first_token_received(A, True) == FirstTokenUse((), ())
    assert it.streaming == A
    assert it.piece_arrived(A) is PieceUse.DROP, "D was not told that it ended"
    assert not it.is_candidate(B)


def test_ps_token_comes_too_late_for_an_answer_that_streams() -> None:
    it = streamed(first_from_prefill=True)
    it.alone_dispatched(A)
    it.piece_arrived(A)
    assert it.first_token_received(B, False) is None
    assert it.piece_arrived(A) is PieceUse.PASS


@pytest.mark.parametrize("streams", [True, False])
def test_an_engine_that_computes_the_prompt_too_does_not_start_an_answer_again(streams: bool) -> None:
    """A client that does not stream has nothing of P's token yet."""
    it = Answer(streams, True)
    assert not it.alone_dispatched(A)
    use = it.first_token_received(B, False)
    assert use == FirstTokenUse((), (A,) if streams else ())
    assert it.is_candidate(A) is not streams
    assert it.fork().piece_arrived(A) is (PieceUse.DROP if streams else PieceUse.FIRST)
    assert it.alone_dispatched(C), "this one continues behind it"
    assert it.piece_arrived(C) is PieceUse.FIRST


@pytest.mark.parametrize("streams", [True, False])
def test_ps_token_is_received_at_once_by_clients_that_stream(streams: bool) -> None:
    it = Answer(streams, True)
    it.first_token_received(A, False)
    assert it.started is streams
    assert it.ended("failed") is (Ending.BREAK_OFF if streams else Ending.ERROR)


Role = Literal["prefill", "decode"]
PICK = st.integers(0, 5)
SELDOM = st.sampled_from([False] * 7 + [True])
OFTEN = st.sampled_from([True, True, False])


@attrs.define(eq=False)
class Leg:
    """An HTTP request that the driver sends, or will."""

    role: Role
    attempt: str
    answers: bool
    """The client's answer comes from it."""
    returns_first_token: bool = False
    """It is asked for the first token."""
    behind: bool = False
    """It continues behind P's first token."""
    awaits: bool = False
    sent: bool = False
    dropped: bool = False


def any_of(legs: Sequence[Leg], pick: int) -> Leg:
    return legs[pick % len(legs)]


class Served(RuleBasedStateMachine):
    """A client, the driver of its answer, and the router's endpoint, which is told of events later."""

    @initialize(
        streams=OFTEN,
        first=OFTEN,
        one_token=SELDOM,
        dispatch=st.sampled_from(["sequential", "concurrent"]),
        aggregated=st.sampled_from([(), (1,)]),
        keeps=st.booleans(),
        recomputes=st.booleans(),
    )
    def arrive(
        self,
        streams: bool,
        first: bool,
        one_token: bool,
        dispatch: Any,
        aggregated: Sequence[int],
        keeps: bool,
        recomputes: bool,
    ) -> None:
        p, d = (tuple(EngineInfo(f"{role}-{i}", Shards(1, 1, 16)) for i in range(2)) for role in "pd")
        rules = Rules(disaggregation=Disaggregation(((5,), (20,))) if keeps else None, recomputes=recomputes)
        choices = Choice("least-loaded", 2), Choice("least-loaded", 2)
        self.router = HedgingRouter(p, d, dispatch, choices, rules, 3, False, frozenset(aggregated), hedge_after_ns=1)
        self.answer = Answer(streams, first)
        self.now = 0
        self.queue: deque[Any] = deque([RequestArrived(0, first and one_token, 10)])
        self.legs: dict[tuple[Role, str], Leg] = {}
        self.late: list[Leg] = []
        """Taken back, which has not been noticed yet."""
        self.received: list[str] = []
        """By piece that the client has received: whose it is."""
        self.has_first = False
        """The client has P's first token."""
        self.whole = False
        self.forwarded: Counter[str] = Counter()
        self.reported: list[str] = []
        self.reply: Reply | None = None
        self.gone = False
        self.turn(1, True)

    def ask(self, event: str, *args: Any) -> Any:
        """A fork decides the same, and leaves the answer as it is."""
        fork, before = self.answer.fork(), self.answer.fingerprint()
        assert fork.fingerprint() == before
        other = getattr(fork, event)(*args)
        assert self.answer.fingerprint() == before
        result = getattr(self.answer, event)(*args)
        assert (result, self.answer.fingerprint()) == (other, fork.fingerprint())
        return result

    # The router's endpoint, and its effects.

    @precondition(lambda self: self.queue)
    @rule(events=st.integers(1, 3), sends=OFTEN)
    def turn(self, events: int, sends: bool) -> None:
        for _ in range(min(events, len(self.queue))):
            self.handle(self.queue.popleft())
        for leg in self.unsent() if sends else ():
            self.send(leg)

    def handle(self, event: Any) -> None:
        self.now += 1
        for effect in self.router.handle(event, self.now):
            if isinstance(effect, Reply):
                assert self.reply is None
                self.reply = effect
                if not self.gone:
                    self.ends(effect)
            elif isinstance(effect, AbortLeg):
                leg = self.legs.pop((effect.role, effect.request_id), None)
                if leg is not None:
                    self.late.append(leg)
            elif isinstance(effect, (DispatchPrefill, DispatchDecode, DispatchAlone)):
                self.dispatched(effect)

    def ends(self, reply: Reply) -> None:
        has_some = bool(self.received) or self.has_first
        ending = self.ask("ended", reply.outcome)
        if reply.outcome == "completed":
            assert self.whole
            assert ending is Ending.NOTHING
        else:
            assert ending is (Ending.BREAK_OFF if has_some else Ending.ERROR)

    def dispatched(self, effect: DispatchPrefill | DispatchDecode | DispatchAlone) -> None:
        attempt = effect.request_id
        assert attempt in self.reported or not self.answered_to_router(), "a started answer is never retried"
        leg = Leg("prefill" if isinstance(effect, DispatchPrefill) else "decode", attempt, True)
        if self.gone:
            self.end(leg, Code.UNREACHABLE)
            return
        if isinstance(effect, DispatchDecode):
            leg.awaits = self.ask("decode_dispatched", attempt)
            leg.behind = self.answer.has_first_token
        elif isinstance(effect, DispatchPrefill) and effect.keeps:
            leg.answers = False
            leg.returns_first_token = self.ask("prefill_dispatched")
        else:
            leg.behind = self.ask("alone_dispatched", attempt)
        self.legs[leg.role, attempt] = leg

    def answered_to_router(self) -> bool:
        """It has handled the report of an attempt that streams."""
        return bool(self.reported) and not any(isinstance(event, FirstTokenDelivered) for event in self.queue)

    def end(self, leg: Leg, code: Code, ends: bool = False) -> None:
        """The leg has ended: the endpoint will be told."""
        if self.legs.pop((leg.role, leg.attempt), None) is not None:
            self.ask("leg_ended", leg.role, leg.attempt)
        self.report_end(leg, code, ends)

    def report_end(self, leg: Leg, code: Code, ends: bool = False) -> None:
        if leg.role == "decode":
            self.queue.append(DecodeEnded(leg.attempt, code))
            return
        info = EngineInfo("p-0", Shards(1, 1, 16))
        params = KvParams(info, "x", leg.attempt, 3) if code is Code.NONE else None
        self.queue.append(PrefillAnswered(leg.attempt, params, code, ends))

    @precondition(lambda self: self.router.wake_at() is not None and TimeReached() not in self.queue)
    @rule()
    def hedge(self) -> None:
        self.queue.append(TimeReached())

    @rule(engine=st.sampled_from(["p-0", "p-1", "d-0", "d-1"]), dies=SELDOM)
    def lose(self, engine: str, dies: bool) -> None:
        if dies:
            self.queue.extend([EngineLost(engine), EngineChanged(engine, True)])

    @precondition(lambda self: not self.gone and self.reply is None)
    @rule(goes=SELDOM)
    def hang_up(self, goes: bool) -> None:
        if not goes:
            return
        self.gone = True
        assert self.ask("ended", "cancelled") is Ending.NOTHING
        self.queue.append(ClientGone(0))

    # Legs, at engines.

    def unsent(self) -> list[Leg]:
        return [leg for leg in self.legs.values() if not leg.sent and self.answer.is_candidate(leg.attempt)]

    def answering(self) -> list[Leg]:
        """A leg that has been taken back may have a piece on its way."""
        legs = (*self.legs.values(), *self.late)
        return [leg for leg in legs if leg.answers and leg.sent and not leg.awaits and not leg.dropped]

    def prefilling(self) -> list[Leg]:
        return [leg for leg in self.legs.values() if leg.sent and not leg.answers]

    def failing(self) -> list[Leg]:
        return [leg for leg in self.legs.values() if leg.sent and not leg.dropped]

    @precondition(lambda self: self.unsent())
    @rule(pick=PICK)
    def send_one(self, pick: int) -> None:
        self.send(any_of(self.unsent(), pick))

    def send(self, leg: Leg) -> None:
        assert set(self.received) <= {leg.attempt}, "the answer has started with another attempt"
        assert not self.whole
        leg.sent = True

    @precondition(lambda self: self.answering())
    @rule(pick=PICK, last=st.booleans())
    def piece(self, pick: int, last: bool) -> None:
        leg = any_of(self.answering(), pick)
        piece = self.ask("piece_arrived", leg.attempt)
        if piece is PieceUse.DROP:
            leg.dropped = True
            return
        assert not any((self.whole, self.gone, self.reply)), "nothing follows the end"
        assert leg.behind or not self.has_first, "never two first tokens"
        assert (piece is PieceUse.FIRST) is (not self.received)
        if piece is PieceUse.FIRST:
            self.report(leg.attempt)
        self.received.append(leg.attempt)
        if not last and self.answer.streams:
            return
        self.ask("whole", leg.attempt)
        self.whole = True
        if leg not in self.late:
            self.end(leg, Code.NONE)

    def report(self, attempt: str) -> None:
        self.reported.append(attempt)
        self.queue.append(FirstTokenDelivered(0, attempt))

    @precondition(lambda self: self.prefilling())
    @rule(pick=PICK, ends=SELDOM)
    def prefill_answers(self, pick: int, ends: bool) -> None:
        leg = any_of(self.prefilling(), pick)
        use = self.ask("first_token_received", leg.attempt, ends) if leg.returns_first_token else None
        if use is not None:
            assert not any((self.received, self.has_first, self.whole))
            self.has_first = self.answer.streams
            if ends:
                self.report(leg.attempt)
                self.received.append(leg.attempt)
                self.whole = True
            for attempt in use.forward:
                self.forward(attempt)
            for attempt in use.cancel:
                self.cancel(attempt)
        self.end(leg, Code.NONE, ends and use is not None)

    def forward(self, attempt: str) -> None:
        self.forwarded[attempt] += 1
        for leg in (*self.legs.values(), *self.late):
            if (leg.role, leg.attempt) == ("decode", attempt):
                assert leg.awaits
                leg.awaits, leg.behind = False, True

    def cancel(self, attempt: str) -> None:
        (leg,) = [leg for leg in (*self.legs.values(), *self.late) if leg.attempt == attempt and leg.answers]
        if self.legs.pop((leg.role, attempt), None) is not None:
            self.late.append(leg)
        self.report_end(leg, Code.CANCELLED)

    @precondition(lambda self: self.failing())
    @rule(pick=PICK, refused=SELDOM)
    def fail(self, pick: int, refused: bool) -> None:
        self.end(any_of(self.failing(), pick), Code.REJECTED if refused else Code.EXPIRED)

    @precondition(lambda self: self.late)
    @rule(pick=PICK)
    def end_late_leg(self, pick: int) -> None:
        leg = self.late.pop(pick % len(self.late))
        self.ask("leg_ended", leg.role, leg.attempt)

    # What holds at any time.

    @invariant()
    def one_attempt_reaches_the_client(self) -> None:
        assert len(set(self.received)) <= 1
        assert self.reported in ([], self.received[:1])
        assert self.answer.started is (bool(self.received) or self.has_first)

    @invariant()
    def each_that_awaits_gets_the_token_once(self) -> None:
        assert not self.forwarded or max(self.forwarded.values()) == 1
        if self.answer.has_first_token and not self.answer.over:
            assert not any(leg.awaits for leg in self.legs.values())
        assert set(self.forwarded) & set(self.answer.awaiting) == set()

    @invariant()
    def somebody_is_at_work_until_the_end(self) -> None:
        if self.reply is None and not self.queue:
            assert any(self.answer.is_candidate(leg.attempt) and not leg.dropped for leg in self.legs.values())

    def teardown(self) -> None:
        if not hasattr(self, "queue"):
            return
        if not self.gone and self.reply is None:
            self.hang_up(True)
        while self.queue:
            self.turn(1, False)
        assert self.reply is not None
        assert (self.router.attempts, self.router.by_request, self.router.pairs) == ({}, {}, {})
        assert not self.legs
        for leg in self.late:
            self.ask("leg_ended", leg.role, leg.attempt)
        assert (self.answer.awaiting, self.answer.from_start) == ([], [])


TestServed = Served.TestCase
TestServed.settings = settings(max_examples=200, stateful_step_count=40, derandomize=True, deadline=None)


def walk(seed: int) -> None:
    """Longer than what Hypothesis draws, and with fewer deaths."""
    rng = Random(seed)
    it = Served()
    chances = [rng.random() < often for often in (0.8, 0.8, 0.1)]
    it.arrive(
        *chances, rng.choice(["sequential", "concurrent"]), rng.choice([(), (1,)]), *rng.choices([True, False], k=2)
    )
    for _ in range(60):
        pick, draw = rng.randrange(6), rng.random()
        if draw < 0.35:
            if it.queue:
                it.turn(rng.randint(1, 3), rng.random() < 0.7)
        elif draw < 0.55:
            if it.answering():
                it.piece(pick, rng.random() < 0.3)
        elif draw < 0.75:
            if it.prefilling():
                it.prefill_answers(pick, rng.random() < 0.1)
        elif draw < 0.82:
            if it.failing():
                it.fail(pick, rng.random() < 0.1)
        elif draw < 0.9:
            if it.router.wake_at() is not None:
                it.hedge()
        elif draw < 0.97:
            if it.late:
                it.end_late_leg(pick)
        elif draw < 0.99:
            it.lose(rng.choice(["p-0", "p-1", "d-0", "d-1"]), True)
        elif it.reply is None and not it.gone:
            it.hang_up(True)
        it.one_attempt_reaches_the_client()
        it.each_that_awaits_gets_the_token_once()
        it.somebody_is_at_work_until_the_end()
    it.teardown()


@pytest.mark.parametrize("first", range(0, 8000, 2000))
def test_random_walks(first: int) -> None:
    for seed in range(first, first + 2000):
        walk(seed)


def test_an_answer_can_be_whole_when_it_is_about_to_be_resumed() -> None:
    """Its last piece was passed on, and its leg has not ended, when its engine is reported lost."""
    answer = Answer(True, False)
    assert answer.piece_arrived("r1.1") is PieceUse.FIRST
    answer.resume("r1.2")
    answer.whole("r1.1")
    assert answer.over
    assert not answer.is_candidate("r1.2")
    with pytest.raises(LocalProtocolError, match="cannot have the whole answer"):
        Answer(True, False).whole("r1.1")
