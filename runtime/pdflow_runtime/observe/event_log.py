"""The event log of one process of a cluster: its requests, steps and transfers, each with its time. Stages, timelines
and calibrations are computed from it (`rows.py`, `calibrate/`).

Most notes are derived from the endpoints' events and effects, which `turn` receives; the nodes and the engine note what
no endpoint knows: when a step began, when the first piece of an answer passed. The latest notes are kept for `page`;
all of them go to `write`, if it is set. Times are of this process's clock, `offset_ns` moves them to the wall's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Literal, TypeAlias

import msgspec

from pdflow.protocol.effects import Commit, Handshake, PostRead, PostWrite, Send
from pdflow.protocol.events import DecodeAdmitted, DecodeQueued, HandshakeEnded, PrefillQueued, ReadEnded, Received
from pdflow.protocol.ids import EngineInfo, Reg
from pdflow.protocol.messages import Code, Done, Message
from pdflow.protocol.values import Address, EngineId, Instant, RequestId
from pdflow.routing.effects import DispatchAlone, DispatchDecode, DispatchPrefill, Reply
from pdflow.routing.events import DecodeEnded, RequestArrived
from pdflow_runtime.clock import now_ns, wall_offset_ns
from pdflow_runtime.engines.job import Work

KEPT: Final = 1 << 12
"""How many of the latest notes are kept for `page`: about 1 MB, a few seconds of a busy engine."""

Role: TypeAlias = Literal["prefill", "decode", "alone"]
LAST: Final = "last_token"
TOKEN: Final = "token"
RELEASED: Final = "released"
"""Marks beside the stages of `results.records`: the answer is over, D's engine has its first token, P's blocks are
free."""


class _Note(msgspec.Struct, frozen=True, gc=False, array_like=True):
    t: Instant


class RequestReceived(_Note, frozen=True, gc=False, tag="asked"):
    """The router has received a client's request."""

    request: int
    tokens: int


class Sent(_Note, frozen=True, gc=False, tag="sent"):
    """The router sends a leg of a request to an engine."""

    request: int
    request_id: RequestId
    role: Role
    engine: EngineId


class FirstPiecePassed(_Note, frozen=True, gc=False, tag="heard"):
    """The first piece of the answer passes the router."""

    request: int


class Replied(_Note, frozen=True, gc=False, tag="replied"):
    """The router has ended the request."""

    request: int
    outcome: Literal["completed", "failed", "cancelled"]
    reason: str
    attempts: int


class Passed(_Note, frozen=True, gc=False, tag="passed"):
    """A stage of an attempt has ended."""

    request_id: RequestId
    stage: str


class Generated(_Note, frozen=True, gc=False, tag="generated"):
    """All tokens of an attempt's answer have been generated."""

    request_id: RequestId
    tokens: int


class Frame(_Note, frozen=True, gc=False, tag="frame"):
    """A rank has sent a message to another, or has received it. A message that is of no one request has no id."""

    request_id: RequestId
    kind: str
    sender: Address
    receiver: Address
    received: bool


class PeerConnected(_Note, frozen=True, gc=False, tag="met"):
    """A rank's handshake with a peer has succeeded: `t` is when it began."""

    peer: Address
    lasted_ns: int


class Moved(_Note, frozen=True, gc=False, tag="moved"):
    """A transfer of one rank has ended: `t` is when it was ordered, and the other times count from there."""

    request_id: RequestId
    posting_ns: int
    whole_ns: int
    nbytes: int
    descriptors: int


class Stepped(_Note, frozen=True, gc=False, tag="step"):
    """A step of the engine, from its composition until all its tokens have been reported; the sums are those of
    `cost.step`."""

    lasted_ns: int
    prompts: int
    prefill_tokens: int
    attended: int
    decodes: int
    context: int
    later: int
    """Tokens that are not the first of their answers."""
    used: int
    """KV blocks that are not free when the step is over."""


Noted: TypeAlias = (
    RequestReceived | Sent | FirstPiecePassed | Replied | Passed | Generated | Frame | PeerConnected | Moved | Stepped
)


class Page(msgspec.Struct, frozen=True):
    """The latest notes of a process, out of the `noted` that it has made."""

    node: str
    offset_ns: int
    notes: list[Noted]
    noted: int = 0

    def since(self, wall_ns: int) -> Page:
        """Return a page of the notes from that time on."""
        notes = [noted for noted in self.notes if noted.t + self.offset_ns >= wall_ns]
        return Page(self.node, self.offset_ns, notes, self.noted)


class EventLog:
    """The event log of one node. `engines` are those of a router, prefill and decode, as its endpoint numbers them."""

    def __init__(self, node: str) -> None:
        self.node: Final = node
        self.kept: Final[deque[Noted]] = deque(maxlen=KEPT)
        self.noted = 0
        self.write: Callable[[Noted], None] | None = None
        self.engines: tuple[Sequence[EngineInfo], Sequence[EngineInfo]] = ((), ())
        self._handshakes: Final[dict[tuple[Address, Address], Instant]] = {}
        self._turns: Final[dict[type, Callable[[Address, Any, Instant], None]]] = {
            RequestArrived: self._arrived,
            DispatchPrefill: self._prefill_sent,
            DispatchDecode: self._decode_sent,
            DispatchAlone: self._alone_sent,
            DecodeEnded: self._decoded,
            Reply: self._replied,
            PrefillQueued: self._stage("route"),
            DecodeQueued: self._stage("handoff"),
            DecodeAdmitted: self._stage("d_admit"),
            PostWrite: self._ordered,
            PostRead: self._ordered,
            ReadEnded: self._read,
            Received: self._received,
            Send: self._send,
            Handshake: self._handshake_begun,
            HandshakeEnded: self._handshake_ended,
            Commit: self._stage("notify"),
        }

    def page(self) -> Page:
        return Page(self.node, wall_offset_ns(), list(self.kept), self.noted)

    def note(self, noted: Noted) -> None:
        self.kept.append(noted)
        self.noted += 1
        if self.write is not None:
            self.write(noted)

    def turn(self, address: Address, event: Any, effects: Iterable[Any], now: Instant) -> None:
        """Note what follows from an event that was handed to an endpoint, and from its effects."""
        turns = self._turns
        if (noting := turns.get(type(event))) is not None:
            noting(address, event, now)
        for effect in effects:
            if (noting := turns.get(type(effect))) is not None:
                noting(address, effect, now)

    # What nodes and engines say themselves.

    def passed(self, request_id: RequestId, stage: str, at: Instant | None = None) -> None:
        self.note(Passed(now_ns() if at is None else at, request_id, stage))

    def first_piece_passed(self, request: int) -> None:
        self.note(FirstPiecePassed(now_ns(), request))

    def generated(self, request_id: RequestId, tokens: int) -> None:
        self.note(Generated(now_ns(), request_id, tokens))

    def moved(self, begun: Instant, posted: Instant, request_id: RequestId, nbytes: int, descriptors: int) -> None:
        self.note(Moved(begun, request_id, posted - begun, now_ns() - begun, nbytes, descriptors))

    def stepped(self, works: Iterable[Work], begun: Instant, used: int) -> None:
        prompts = prefill = attended = decodes = context = later = 0
        for work in works:
            if work.decodes:
                decodes += 1
                context += work.start + 1
            else:
                new = len(work.tokens)
                prompts += 1
                prefill += new
                attended += new * work.start + new * (new + 1) // 2
            later += work.token_request is not None and work.token_request.index > 0
        self.note(Stepped(begun, now_ns() - begun, prompts, prefill, attended, decodes, context, later, used))

    # What endpoints' turns say.

    def _stage(self, stage: str) -> Callable[[Address, Any, Instant], None]:
        def noting(address: Address, effect: Any, now: Instant) -> None:
            self.note(Passed(now, effect.request_id, stage))

        return noting

    def _arrived(self, address: Address, event: RequestArrived, now: Instant) -> None:
        self.note(RequestReceived(now, event.request, event.prompt_tokens))

    def _prefill_sent(self, address: Address, effect: DispatchPrefill, now: Instant) -> None:
        role: Role = "prefill" if effect.keeps else "alone"
        self.note(Sent(now, effect.request, effect.request_id, role, self.engines[0][effect.engine].engine))

    def _decode_sent(self, address: Address, effect: DispatchDecode, now: Instant) -> None:
        self.note(Sent(now, effect.request, effect.request_id, "decode", self.engines[1][effect.engine].engine))

    def _alone_sent(self, address: Address, effect: DispatchAlone, now: Instant) -> None:
        self.note(Sent(now, effect.request, effect.request_id, "alone", self.engines[1][effect.engine].engine))

    def _decoded(self, address: Address, event: DecodeEnded, now: Instant) -> None:
        if event.code is Code.NONE:
            self.note(Passed(now, event.request_id, LAST))

    def _replied(self, address: Address, effect: Reply, now: Instant) -> None:
        reason = effect.reason or ("" if effect.outcome == "completed" else effect.code.name.lower())
        self.note(Replied(now, effect.request, effect.outcome, reason, effect.attempts))

    def _ordered(self, address: Address, effect: PostWrite | PostRead, now: Instant) -> None:
        self.note(Passed(now, effect.op.reg.request_id, "handshake"))

    def _read(self, address: Address, event: ReadEnded, now: Instant) -> None:
        if event.ok:
            self.note(Passed(now, event.op.reg.request_id, "xfer_wire"))

    def _received(self, address: Address, event: Received, now: Instant) -> None:
        message = event.message
        if type(message) is Done:
            self.note(Passed(now, message.reg.request_id, "xfer_wire"))
        else:
            self.note(Frame(now, _request_id(message), type(message).__name__, event.sender, address, True))

    def _handshake_begun(self, address: Address, effect: Handshake, now: Instant) -> None:
        self._handshakes[address, effect.peer] = now

    def _handshake_ended(self, address: Address, event: HandshakeEnded, now: Instant) -> None:
        begun = self._handshakes.pop((address, event.peer), None)
        if begun is not None and event.ok:
            self.note(PeerConnected(begun, event.peer, now - begun))

    def _send(self, address: Address, effect: Send, now: Instant) -> None:
        message = effect.message
        self.note(Frame(now, _request_id(message), type(message).__name__, address, effect.to, False))


def _request_id(message: Message) -> RequestId:
    reg: Reg | None = getattr(message, "reg", None)
    return "" if reg is None else reg.request_id
