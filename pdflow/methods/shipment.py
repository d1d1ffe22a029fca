"""The state of one WRITE or READ in pieces: what may be posted next, which piece has the notification, how it ended.

A piece is some tokens of one layer. It is offered when its bytes are in the memory that they are sent from, in any
order and of any size. Tokens that D already has are cut off. The last piece is posted when all others have ended well:
its notification then arrives after all data, and D need not count pieces (S7). After a failure or a stop, nothing more
is posted, and the shipment ends when the pieces in flight have ended.

A shipment does not decide how many pieces a rank has in flight (`lanes.py`), nor what an end means: the protocol
does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from enum import Enum

from pdflow.protocol.values import Value


class Piece(Value, frozen=True, gc=False):
    """Tokens `start` to `stop` of one of the rank's layers."""

    layer: int
    start: int
    stop: int


class ShipmentEnd(Enum):
    """The way in which a shipment ended."""

    SENT = "sent"
    STOPPED = "stopped"
    FAILED = "failed"


class Shipment:
    """The sending of tokens `start` to `stop` of a shard's `layers`, in pieces."""

    __slots__ = ("_failed", "_in_flight", "_left", "_queue", "_queued", "_stopped", "_unposted", "start", "stop")

    def __init__(self, layers: int, start: int, stop: int) -> None:
        self.start = start
        self.stop = stop
        self._queue: deque[Piece] = deque()
        self._queued = 0
        """Tokens of layers in the queue."""
        self._unposted = self._left = layers * (stop - start)
        """Tokens of layers not posted yet; not landed yet."""
        self._in_flight = 0
        self._failed = self._stopped = False

    def offer(self, piece: Piece) -> None:
        """Add a piece that can be sent now."""
        start, stop = max(piece.start, self.start), min(piece.stop, self.stop)
        if start < stop:
            self._queue.append(Piece(piece.layer, start, stop))
            self._queued += stop - start

    def next(self) -> Piece | None:
        """Return the next piece to be posted, which counts as posted from here on; None if there is none for now."""
        if self._failed or self._stopped or not self._queue:
            return None
        piece = self._queue[0]
        tokens = piece.stop - piece.start
        if tokens == self._unposted and self._in_flight:
            return None
        self._queue.popleft()
        self._queued -= tokens
        self._unposted -= tokens
        self._in_flight += 1
        return piece

    @property
    def ready(self) -> int:
        """The number of pieces that `next` would give, one after the other, before any other ends."""
        count = len(self._queue)
        if self._failed or self._stopped or not count:
            return 0
        if count == 1 and not self._in_flight:
            return 1
        # The last piece of all waits until the others have landed.
        return count - (self._queued == self._unposted)

    @property
    def all_posted(self) -> bool:
        """Whether the piece that was posted last is the last one: the notification goes with it."""
        return not self._unposted

    def landed(self, piece: Piece) -> None:
        """End a posted piece that has landed."""
        self._in_flight -= 1
        self._left -= piece.stop - piece.start

    def lost(self) -> None:
        """End a posted piece that has failed, or will never be posted."""
        self._in_flight -= 1
        self._failed = True

    def recall(self, piece: Piece) -> None:
        """Take back a posted piece that has not begun to move, and will not: it is as if it had not been posted."""
        tokens = piece.stop - piece.start
        self._in_flight -= 1
        self._unposted += tokens
        self._queue.appendleft(piece)
        self._queued += tokens

    def skip(self, piece: Piece) -> None:
        """End a posted piece that will not land as if it had landed, without reporting it."""
        self.landed(piece)

    def halt(self) -> None:
        """Post nothing more."""
        self._stopped = True

    def ending(self) -> ShipmentEnd | None:
        """Return how the shipment ended; None while it has not."""
        if self._in_flight:
            return None
        if not self._left:
            return ShipmentEnd.SENT
        if self._failed:
            return ShipmentEnd.FAILED
        return ShipmentEnd.STOPPED if self._stopped else None

    def fork(self) -> Shipment:
        other = Shipment(0, self.start, self.stop)
        other._queue, other._queued = self._queue.copy(), self._queued
        other._unposted, other._left, other._in_flight = self._unposted, self._left, self._in_flight
        other._failed, other._stopped = self._failed, self._stopped
        return other

    def fingerprint(self) -> Hashable:
        return tuple(self._queue), self._unposted, self._left, self._in_flight, self._failed, self._stopped


def whole(layers: int, stop: int) -> list[Piece]:
    """Return all pieces of a prompt, layer by layer."""
    return [Piece(layer, 0, stop) for layer in range(layers)]
