"""Each frame of a scope passes the real codec (S9)."""

from __future__ import annotations

import attrs
import msgspec
import pytest

from pdflow.protocol.dialect import VLLM_COMPAT
from pdflow.protocol.messages import Completion, Register, StrictFrame
from pdflow.protocol.wire import strict, vllm
from pdflow.protocol.wire.checks import frame_problem
from pdflow.protocol.wire.vllm import PushReg
from pdflow_sim.check.moves.compose import relation
from pdflow_sim.check.scopes.scope import Scope
from pdflow_sim.check.search.search import shortest
from pdflow_sim.check.state import wire_checks

COMPAT = Scope(dialect=VLLM_COMPAT, stall=0)


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


def test_a_notification_of_vllm_that_is_read_otherwise_than_it_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = vllm.decode_notification

    def counted_once_more(data: bytes) -> object:
        read = decode(data)
        return msgspec.structs.replace(read, count=read.count + 1) if isinstance(read, Completion) else read

    monkeypatch.setattr(wire_checks, "decode_notification", counted_once_more)
    assert "and its peer reads Completion(" in found(COMPAT)


def test_a_registration_that_is_read_without_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = vllm.decode_notification

    def without_blocks(data: bytes) -> object:
        read = decode(data)
        return msgspec.structs.replace(read, local_block_ids=((1,),)) if isinstance(read, PushReg) else read

    monkeypatch.setattr(wire_checks, "decode_notification", without_blocks)
    assert "and its peer reads Register(" in found(COMPAT)


@pytest.mark.parametrize(
    ("name", "scope"), [("frame_size", Scope()), ("notification_size", Scope(dialect=VLLM_COMPAT))]
)
@pytest.mark.parametrize("by", [-1, 12])
def test_a_size_that_differs_from_the_bytes(name: str, scope: Scope, by: int, monkeypatch: pytest.MonkeyPatch) -> None:
    size = getattr(wire_checks, name)
    monkeypatch.setattr(wire_checks, name, lambda *args, **keys: size(*args, **keys) + by)
    assert "and simulations count" in found(attrs.evolve(scope, deadline=0, stall=0))


def test_a_stream_that_loses_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strict.FrameDecoder, "feed", lambda self, data: [])
    assert "over a stream" in found(Scope(deadline=0, stall=0))
