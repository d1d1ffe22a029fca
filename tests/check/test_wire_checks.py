"""Each frame of a scope passes the real codec (S9)."""

from __future__ import annotations

import msgspec
import pytest

from pdflow.protocol.messages import Register, StrictFrame
from pdflow.protocol.wire import strict
from pdflow.protocol.wire.checks import frame_problem
from pdflow_sim.check.moves.compose import relation
from pdflow_sim.check.scopes.scope import Scope
from pdflow_sim.check.search.search import shortest
from pdflow_sim.check.state import wire_checks


def found(scope: Scope) -> str:
    counterexample = shortest(relation(scope))
    assert counterexample is not None
    assert counterexample.broken.name == "S9"
    return counterexample.broken.what


def test_a_frame_that_is_read_otherwise_than_it_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = strict.decode_frame

    def without_start(data: bytes) -> object:
        read = decode(data)
        return msgspec.structs.replace(read, token_start=1) if isinstance(read, Register) else read

    monkeypatch.setattr(wire_checks, "decode_frame", without_start)
    assert "and its peer reads Register(" in found(Scope(deadline=0, stall=0))


def test_a_notification_that_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_checks, "decode_done", lambda data: strict.decode_frame(data[:-1]))
    assert "sends Done(" in found(Scope(deadline=0, stall=0))


def test_a_frame_that_no_peer_would_accept(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(message: StrictFrame) -> str | None:
        return "too long" if isinstance(message, Register) else frame_problem(message)

    monkeypatch.setattr(strict, "frame_problem", refused)
    assert found(Scope(deadline=0, stall=0)).endswith("Register cannot be sent: too long")
