"""What a scheduler's half and its workers' halves send each other with every step, encoded.

Down, with the step's connector metadata, to all ranks: events for the endpoints of ranks, addresses of other engines'
ranks, and what P may send as soon as this step has computed it. Up, with the step's output, from each rank: events for
the scheduler's endpoint. An event is `[kind, fields]`, where the kind counts through `LocalEvent`; both ends are the
same version of pdflow, in processes that vLLM has started.

A step carries at most MOST_EVENTS down; what is left goes with the next one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple, get_args

import msgspec

from pdflow.protocol.events import LocalEvent
from pdflow.protocol.values import Address, Xid

MOST_EVENTS: Final = 4096
"""The most events of one step: some 2 MiB of registrations of 100 blocks."""

KINDS: Final[tuple[type[msgspec.Struct], ...]] = get_args(LocalEvent)
_NUMBERS: Final = {kind: number for number, kind in enumerate(KINDS)}
_encode: Final = msgspec.msgpack.Encoder().encode
_decoders: Final = [msgspec.msgpack.Decoder(kind) for kind in KINDS]


class EncodedEvent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One event for an endpoint, whose fields are encoded by its kind."""

    to: Address
    kind: int
    fields: msgspec.Raw


class Offer(NamedTuple):
    """A piece of a prompt that may be sent once this step has computed this layer, or all layers."""

    xid: Xid
    layer: int
    start: int
    stop: int


class DownMessage(msgspec.Struct, frozen=True, array_like=True):
    """From the scheduler's half to every rank."""

    events: list[EncodedEvent] = []
    addresses: list[tuple[Address, str, int]] = []
    """Where a rank, or all ranks of an engine, listen."""
    offers: list[Offer] = []
    withdrawn: list[Xid] = []
    """Prompts of which nothing is offered any more."""
    open: bool = False
    """The scheduler's endpoint has something unfinished."""
    waits: bool = False
    """The step computes nothing, and may wait for something to report."""


class UpMessage(msgspec.Struct, frozen=True, array_like=True):
    """From one rank to the scheduler's half."""

    rank: int
    events: list[EncodedEvent]
    broken: str = ""
    """Why this rank moves nothing any more; empty while it works."""


_down: Final = msgspec.msgpack.Decoder(DownMessage)
_up: Final = msgspec.msgpack.Decoder(UpMessage)


def encoded(to: Address, event: Any) -> EncodedEvent:
    return EncodedEvent(to, _NUMBERS[type(event)], msgspec.Raw(_encode(event)))


def decoded(event: EncodedEvent) -> Any:
    """Return the event."""
    return _decoders[event.kind].decode(event.fields)


def encode_down(message: DownMessage) -> bytes:
    return _encode(message)


def decode_down(data: bytes) -> DownMessage:
    return _down.decode(data)


def encode_up(rank: int, events: Iterable[tuple[Address, Any]], broken: str = "") -> bytes:
    return _encode(UpMessage(rank, [encoded(to, event) for to, event in events], broken))


def decode_up(data: bytes) -> UpMessage:
    return _up.decode(data)
