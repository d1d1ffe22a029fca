"""Strict frames: the control stream's framing, HELLO, and DONE as the notification of its WRITE (spec 3.5).

    frame = length: 4 bytes, big-endian, of what follows | version: 1 byte | body: one msgpack map, tagged by "type"

A body is a map, not an array. The messages' own structs are then the wire format; a field added with a default is no
new version, since unknown keys are skipped; and a dump can be read. It costs the field names, 60 to 130 bytes a frame
on a path where nothing waits for them.

A stream belongs to one pair of endpoints. The first frame of each direction is HELLO, and there is never a second:
the opener's at once, the acceptor's after having read it, with the opener's nonce as its echo. So HELLOs cannot
answer each other for ever, and no other frame has to name its sender: who sent it, and in which life, is in the HELLO.
"""

from __future__ import annotations

import re
from typing import TypeAlias

import msgspec

from pdflow.protocol.errors import LocalProtocolError
from pdflow.protocol.messages import (
    Cancel,
    CancelAck,
    Done,
    Fail,
    Register,
    RegisterAck,
    Release,
    StrictFrame,
    Sync,
    SyncReply,
    Taken,
)
from pdflow.protocol.values import Address, Value
from pdflow.protocol.wire.checks import Problem, frame_problem, range_problem, text_problem
from pdflow.protocol.wire.limits import MAX_FRAME_BYTES, MAX_HANDSHAKE_BYTES, MAX_NAME_BYTES, MAX_RANKS, MAX_U64
from pdflow.protocol.wire.malformed import Malformed, malformed, unpack

VERSION = 1
LENGTH_BYTES = 4
HEADER_BYTES = LENGTH_BYTES + 1


class Hello(Value, frozen=True, gc=False, tag="HELLO"):
    """The first frame of a stream: the sender of all that follow, and the incarnation of its engine."""

    address: Address
    incarnation: int
    nonce: int
    """Fresh for this stream, never 0."""
    echo: int
    """The opener's nonce in the acceptor's HELLO: proof that this incarnation is running now. 0 in the opener's."""
    to: Address = ""
    """The rank that the opener wants to reach, where several ranks listen at one address."""
    metadata: bytes = b""
    """The data that the other side's transport needs to reach this rank's memory. Opaque here."""


Frame: TypeAlias = Hello | StrictFrame

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(
    Hello | Register | RegisterAck | Done | Fail | Cancel | CancelAck | Release | Taken | Sync | SyncReply
)
_RANK_ADDRESS = re.compile(r".+\.r(0|[1-9][0-9]{0,3})", re.DOTALL)


def encode_frame(message: Frame) -> bytes:
    """Encode a message as one whole frame. Raises LocalProtocolError for a message that no peer would accept."""
    problem = _problem(message)
    if problem:
        raise LocalProtocolError(f"{type(message).__name__} cannot be sent: {problem}")
    body = _encoder.encode(message)
    length = 1 + len(body)
    if length > MAX_FRAME_BYTES:
        raise LocalProtocolError(f"{type(message).__name__} of {length} bytes, {MAX_FRAME_BYTES} are allowed")
    return b"".join((length.to_bytes(LENGTH_BYTES, "big"), bytes((VERSION,)), body))


def decode_frame(data: bytes) -> Frame | Malformed:
    """Decode exactly one frame, with nothing behind it."""
    length = int.from_bytes(data[:LENGTH_BYTES], "big")
    if len(data) < HEADER_BYTES or len(data) != LENGTH_BYTES + length:
        return malformed(f"{len(data)} bytes are not one frame")
    return _read(length, memoryview(data)[LENGTH_BYTES:])


def decode_done(data: bytes) -> Done | Malformed:
    """Decode the notification of a strict peer's WRITE. Which peer is strict is known by the sending agent, not by
    bytes."""
    frame = decode_frame(data)
    if isinstance(frame, Done | Malformed):
        return frame
    return malformed(f"{type(frame).__name__} as a notification, only DONE may be")


class FrameDecoder:
    """Splits one direction of one stream into frames, however its bytes arrive.

    The first malformed frame is the last thing that a stream yields: what follows it cannot be trusted to be frames.
    Other streams are not affected. Keeps at most one frame's bytes between calls.
    """

    __slots__ = ("_buffer", "hello", "poisoned")

    def __init__(self) -> None:
        self._buffer = bytearray()
        self.hello: Hello | None = None
        """The sender's first frame, once it has arrived."""
        self.poisoned = False

    def feed(self, data: bytes) -> list[Frame | Malformed]:
        """Take received bytes and return the frames that are complete now, in order."""
        frames: list[Frame | Malformed] = []
        if self.poisoned:
            return frames
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= HEADER_BYTES:
            length = int.from_bytes(buffer[start : start + LENGTH_BYTES], "big")
            end = start + LENGTH_BYTES + length
            frame = self._next(length, start + LENGTH_BYTES, end)
            if frame is None:
                break
            frames.append(frame)
            start = end
            if isinstance(frame, Malformed):
                self.poisoned = True
                start = len(buffer)
        del buffer[:start]
        return frames

    def _next(self, length: int, start: int, end: int) -> Frame | Malformed | None:
        """Return the frame in this range of the buffer; None while it is incomplete and could still be one."""
        buffer = self._buffer
        problem = _header_problem(length, buffer[start])
        if problem:
            return malformed(problem)
        if end > len(buffer):
            return None
        with memoryview(buffer) as whole, whole[start:end] as view:
            frame = _read(length, view)
        if isinstance(frame, Malformed):
            return frame
        if isinstance(frame, Hello) != (self.hello is None):
            return malformed("a second HELLO" if self.hello else f"{type(frame).__name__} before HELLO")
        if isinstance(frame, Hello):
            self.hello = frame
        return frame


def _header_problem(length: int, version: int) -> Problem:
    if not 2 <= length <= MAX_FRAME_BYTES:
        return f"a frame of {length} bytes, expected 2 to {MAX_FRAME_BYTES}"
    return "" if version == VERSION else f"frame version {version}, this side uses {VERSION}"


def _read(length: int, payload: memoryview) -> Frame | Malformed:
    problem = _header_problem(length, payload[0])
    if problem:
        return malformed(problem)
    with payload[1:] as body:
        frame = unpack(_decoder, body)
    if isinstance(frame, Malformed):
        return frame
    problem = _problem(frame)
    return malformed(f"{type(frame).__name__}: {problem}") if problem else frame


def _problem(message: Frame) -> Problem:
    return _hello_problem(message) if isinstance(message, Hello) else frame_problem(message)


def _hello_problem(hello: Hello) -> Problem:
    """Check a HELLO. Only ranks open or accept streams, and their address has one spelling: endpoints parse the rank
    out of it."""
    problem = text_problem("address", hello.address, MAX_NAME_BYTES)
    if problem:
        return problem
    match = _RANK_ADDRESS.fullmatch(hello.address)
    if match is None or int(match[1]) >= MAX_RANKS:
        return f"address is {hello.address!r}, expected ENGINE.rRANK"
    return (
        range_problem("incarnation", hello.incarnation, 0, MAX_U64)
        or range_problem("nonce", hello.nonce, 1, MAX_U64)
        or range_problem("echo", hello.echo, 0, MAX_U64)
        or (text_problem("to", hello.to, MAX_NAME_BYTES) if hello.to else "")
        or (
            f"metadata has {len(hello.metadata):,} bytes, at most {MAX_HANDSHAKE_BYTES:,}"
            if len(hello.metadata) > MAX_HANDSHAKE_BYTES
            else ""
        )
    )
