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
        name="any-attempts-pieces-pass",
        drops="The first attempt to bring a piece of the answer brings all of it. A client would get two beginnings.",
        source="issue 16: the router's answer",
        patches=(Swap(Answer.piece_arrived, _any_attempts),),
        scope=STREAMED,
        breaks="S6",
    ),
    Mutant(
        name="first-piece-is-not-reported",
        drops="The endpoint is told which attempt streams. A retry would follow, and its answer be dropped for ever.",
        source="issue 16: the router's answer",
        patches=(Swap(Answer.piece_arrived, _unreported),),
        scope=Scope(dialect=VLLM_COMPAT, attempts=2, pulls=True, d_restart=1, abort=0, streams=True),
        breaks="L",
    ),
    Mutant(
        name="error-behind-the-start",
        drops="An answer that has begun breaks off. An error would follow as if it were the whole answer.",
        source="issue 16: the router's answer",
        patches=(Swap(Answer.ended, _error_in_any_case),),
        scope=STREAMED,
        breaks="S6",
    ),
    Mutant(
        name="answer-goes-on-behind-its-end",
        drops="When a request has ended nothing more is passed on.",
        source="issue 16: the router's answer",
        patches=(Swap(Answer.ended, _goes_on),),
        scope=STREAMED,
        survives="A second line: over the connection of a leg that was taken back nothing comes here. "
        "tests/routing/test_answer.py shows it.",
    ),
)
