"""A transport and streams in memory, on which nothing moves until a test says so; bytes are really moved."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Final, cast

import attrs
import trio

from pdflow.layout.descriptors import Descriptor
from pdflow.methods.shipment import Piece
from pdflow.protocol.effects import Fence, Handshake, PostRead, PostWrite, Send
from pdflow.protocol.events import ReadEnded, WriteEnded, WriteStopped
from pdflow.protocol.ids import Op
from pdflow.protocol.values import Address
from pdflow.protocol.wire.strict import Frame, FrameDecoder, Hello, encode_frame
from pdflow.serving.core import Port
from pdflow_runtime.nodes.links import RankLinks
from pdflow_runtime.nodes.node import LiveNode
from pdflow_runtime.nodes.ranks import Rank
from pdflow_runtime.nodes.transfers import InFlightTransfers, MakePlan
from pdflow_runtime.transports.base import (
    DoneMeans,
    Ended,
    EventSink,
    Fenced,
    Fences,
    Flushed,
    NotificationArrived,
    Stopped,
    Transport,
    WordArrived,
)

Where = Callable[[Address], "Held"]
"""The transport of a rank that lives now."""


@attrs.define(eq=False)
class Operation:
    """A WRITE, a READ, or the reading of a word, under way."""

    number: int
    poster: Held
    source: bytearray
    target: bytearray
    pieces: Sequence[Descriptor]
    notification: bytes | None = None
    other: Held | None = None
    air: deque[list[tuple[int, bytes]]] = attrs.field(factory=deque)
    """Parts that are read and have not landed."""

    def read(self, index: int, count: int) -> None:
        """The source's share `index` of `count`."""
        self.air.append(
            [
                (piece.target_address, bytes(self.source[piece.source_address : piece.source_address + piece.length]))
                for piece in self.pieces[index::count]
            ]
        )

    def land(self) -> None:
        for at, data in self.air.popleft():
            self.target[at : at + len(data)] = data

    def report_notification(self) -> None:
        assert self.notification is not None
        assert self.other is not None
        self.other.on_event(NotificationArrived(self.poster.address, self.notification))

    def end(self, ok: bool) -> None:
        self.poster.on_event(Ended(self.number, ok))

    def end_stopped(self) -> None:
        self.poster.on_event(Stopped(self.number))

    def report_word(self, value: int) -> None:
        self.poster.on_event(WordArrived(self.number, value))


class Held:
    """One rank's. What is asked of it stands in `posted`, in order, until somebody takes it."""

    name = "held"
    fences: Fences = "revoke"

    def __init__(self, address: Address, on_event: EventSink, where: Where, done_means: DoneMeans = "remote") -> None:
        self.done_means: Final[DoneMeans] = done_means
        self.address: Final = address
        self.on_event: Final = on_event
        self.where: Final = where
        self.posted: Final[deque[Operation]] = deque()
        self.memory = bytearray()

    def allocate(self, nbytes: int) -> memoryview:
        self.memory = bytearray(nbytes)
        return memoryview(self.memory)

    def describe(self) -> bytes:
        return b""

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        raise AssertionError("a test moves what is here")

    async def connect(self, peer: Address, description: bytes) -> None:
        """At once: nobody else's turn comes in between."""

    def write(
        self, op: int, peer: Address, pieces: Sequence[Descriptor], generation: int, notification: bytes | None
    ) -> None:
        other = self.where(peer)
        self.posted.append(Operation(op, self, self.memory, other.memory, pieces, notification, other))

    def read(self, op: int, peer: Address, pieces: Sequence[Descriptor]) -> None:
        self.posted.append(Operation(op, self, self.where(peer).memory, self.memory, pieces))

    def read_word(self, op: int, peer: Address, address: int) -> None:
        self.posted.append(Operation(op, self, self.where(peer).memory, self.memory, [Descriptor(address, 0, 8)]))

    def stop(self, op: int) -> None:
        """A test ends it."""

    def flush(self, peer: Address) -> None:
        """A test ends it."""

    def fence(self, peer: Address, newest_generation: int) -> None:
        """A test ends it."""

    def end_flush(self, peer: Address, ok: bool) -> None:
        self.on_event(Flushed(peer, ok))

    def end_fence(self, peer: Address) -> None:
        self.on_event(Fenced(peer))

    def forget(self, peer: Address) -> None:
        raise AssertionError("nobody asks for that")

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()


class HeldTransfers(InFlightTransfers):
    """With `holds`, a test says when a piece is posted, when an end is told, and when what is to stop or to be cut off
    is. A flush behind a piece that has ended has ended, too."""

    def __init__(
        self,
        transport: Transport,
        numbers: Iterator[int],
        make_plan: MakePlan,
        put: Callable[[Any], None],
        incarnation: int,
        flush: Callable[[Address, Callable[[bool], None]], None],
    ) -> None:
        super().__init__(transport, numbers, make_plan, self._end, incarnation, self._prove_by)
        self.holds = False
        self.on_event: Final = put
        self.ends: dict[Op, WriteEnded | WriteStopped | ReadEnded] = {}
        """Of operations that are over, and nobody has been told."""
        self._really_flush: Final = flush
        self._asked: list[Op | Address] = []
        """What is to stop, and who is to be cut off."""

    def _end(self, event: Any) -> None:
        if self.holds:
            self.ends[event.op] = event
        else:
            self.on_event(event)

    def _prove_by(self, peer: Address, then: Callable[[bool], None]) -> None:
        if self.holds:
            then(True)
        else:
            self._really_flush(peer, then)

    def _pump(self) -> None:
        if not self.holds:
            super()._pump()

    def stop(self, op: Op) -> None:
        if self.holds:
            self._asked.append(op)
        else:
            super().stop(op)

    def disconnect(self, peer: Address) -> None:
        if self.holds:
            self._asked.append(peer)
        else:
            super().disconnect(peer)

    # What a test says.

    def post_next(self) -> tuple[PostWrite | PostRead, Piece] | None:
        """The next piece, if there is one."""
        found = self._lanes.next()
        if found is None:
            return None
        transfer, piece = found
        self._post(transfer, piece)
        return transfer.effect, piece

    def ready(self) -> Hashable:
        """What can be sent of each prompt that the rank has."""
        _, ready, *_ = cast(tuple[Hashable, ...], self._lanes.fingerprint())
        return ready

    def next(self) -> tuple[Op, Piece] | None:
        """The piece that would be posted now."""
        found = self._lanes.fork().next()
        return None if found is None else (found[0].effect.op, found[1])

    def is_open(self, op: Op) -> bool:
        return op in self._open

    def is_disconnected(self, op: Op) -> bool:
        return self._open[op].disconnected

    def stop_now(self, op: Op) -> None:
        self._asked.remove(op)
        super().stop(op)

    def disconnect_now(self, peer: Address) -> None:
        self._asked.remove(peer)
        super().disconnect(peer)


class Wires(RankLinks):
    """Frames as bytes, which wait in `out` by whom they are for. Effects are only taken note of."""

    def __init__(self, node: LiveNode, ranks: Mapping[Address, Rank]) -> None:
        super().__init__(node, ranks)
        self.out: dict[tuple[Address, Address], deque[bytes]] = {}

    def send(self, port: Port, effect: Send) -> None:
        assert isinstance(effect.message, Frame)
        self.out.setdefault((port.address, effect.to), deque()).append(encode_frame(effect.message))

    def handshake(self, port: Port, effect: Handshake) -> None:
        """A test ends it."""

    def fence(self, port: Port, effect: Fence) -> None:
        """A notice that is under way by then arrives all the same: so the stream stays."""


_HELLO: Final = encode_frame(Hello("a.r0", 1, 1, 0, "b.r0", b""))
"""No stream begins without one."""


def frame(data: bytes) -> Any:
    """The one that these bytes are."""
    _, found = FrameDecoder().feed(_HELLO + data)
    return found
