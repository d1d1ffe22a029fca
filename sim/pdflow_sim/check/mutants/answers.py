"""Mutants of the answer to a client: of several attempts one brings it, and the router's endpoint knows which."""

from __future__ import annotations

from typing import Literal

from pdflow.protocol.dialect import VLLM_COMPAT
from pdflow.protocol.values import RequestId
from pdflow.routing.answer import Answer, Ending, PieceUse
from pdflow_sim.check.mutants.mutant import Mutant, Swap
from pdflow_sim.check.scopes.scope import Scope


def _any_attempts(self: Answer, attempt: RequestId) -> PieceUse:
    if self.over:
        return PieceUse.DROP
    if self.streaming is not None:
        return PieceUse.PASS
    self.streaming = attempt
    return PieceUse.FIRST


def _unreported(self: Answer, attempt: RequestId) -> PieceUse:
    piece = _piece_arrived(self, attempt)
    return PieceUse.PASS if piece is PieceUse.FIRST else piece


def _error_in_any_case(self: Answer, outcome: Literal["completed", "failed", "cancelled"]) -> Ending:
    ending = _ended(self, outcome)
    return Ending.ERROR if ending is Ending.BREAK_OFF else ending


def _goes_on(self: Answer, outcome: Literal["completed", "failed", "cancelled"]) -> Ending:
    over = self.over
    ending = _ended(self, outcome)
    self.over = over
    return ending


_piece_arrived = Answer.piece_arrived
_ended = Answer.ended

STREAMED = Scope(attempts=2, pulls=True, d_restart=1, abort=0, clocks=False, streams=True)

ANSWERS = (
    Mutant(
        name="pieces-of-any-attempt-pass",
        drops="The first attempt to stream a piece of the answer streams all of it. Without it, a client gets "
        "two beginnings.",
        source="issue 16: the router's answer",
        patches=(Swap(Answer.piece_arrived, _any_attempts),),
        scope=STREAMED,
        breaks="S6",
    ),
    Mutant(
        name="first-piece-is-not-reported",
        drops="The router's endpoint is notified which attempt streams. Without it, the router retries, and the "
        "retry's answer is dropped forever.",
        source="issue 16: the router's answer",
        patches=(Swap(Answer.piece_arrived, _unreported),),
        scope=Scope(dialect=VLLM_COMPAT, attempts=2, pulls=True, d_restart=1, abort=0, streams=True),
        breaks="L",
    ),
    Mutant(
        name="error-after-first-piece",
        drops="An answer that has begun breaks off when its request fails. Without it, the error follows as if "
        "it were the whole answer.",
        source="issue 16: the router's answer",
        patches=(Swap(Answer.ended, _error_in_any_case),),
        scope=STREAMED,
        breaks="S6",
    ),
    Mutant(
        name="answer-continues-after-its-end",
        drops="The router passes on nothing after a request has ended.",
        source="issue 16: the router's answer",
        patches=(Swap(Answer.ended, _goes_on),),
        scope=STREAMED,
        survives="A second check: in these scopes nothing arrives over the connection of a leg that was cancelled. "
        "tests/routing/test_answer.py covers it.",
    ),
)
