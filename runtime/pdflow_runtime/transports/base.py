"""The interface that every transport implements: calls, events, guarantees and errors.

A transport is one rank's agent: it owns one region of memory, and moves bytes between that and its peers' regions.
It decides how bytes move, and that none moves which must not; it decides nothing about blocks, leases or requests.

The promises, which the conformance suite holds every transport to:

- No call but `connect`, `run` and `aclose` waits. The end of an operation is reported by an event, in trio's thread.
  `on_event` must only take note of it: it may be called from within a call.
- Each operation ends exactly once, in Ended, Stopped or WordArrived. Ended(ok=False) says nothing about bytes that are
  still under way: a fence does. Nor does Ended(ok=True) of a WRITE where `done_means` is local: a flush does.
- A notice is delivered to the peer after all bytes of its WRITE have landed, and not at all if some have not.
- After Fenced(peer): no byte of that peer lands here by a WRITE into a generation up to the one given, nor by a READ
  of ours posted before; and no WRITE of ours posted before lands there, or reads its source any more. Where `fences`
  is close, the transport does not look at generations, so it holds this of connections that were made by what
  `describe` said before the fence: they are ended, and no other one is accepted. The ranks keep it for later ones.
- After PeerGone(peer): as after a fence of every generation, until it connects again.
- Nothing a peer sends raises here, or harms anybody but that peer.

Addresses are offsets from the start of a region. Generations are those of the memory's owner (`Allocation.generation`).

    TransportError        a peer cannot be reached, or memory cannot be had; one sentence
      MissingBackend      the library that this transport needs is not installed
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol, TypeAlias

import trio

from pdflow.layout.descriptors import Descriptor
from pdflow.protocol.values import Address, Value

DoneMeans: TypeAlias = Literal["remote", "local"]
"""The meaning of Ended(ok=True) of a WRITE.

remote: its bytes have landed at the peer.
local: its source may be reused. The bytes may land later, or never if the connection breaks. The endpoint flushes the
peer before it reports the WRITE as sent, and no notice is posted behind other WRITEs before a flush has proved that
these have landed."""
Fences: TypeAlias = Literal["revoke", "close"]
"""The way in which the owner of memory keeps a peer from WRITEs that were granted before a fence.

revoke: it refuses their generations, whenever they were posted. The connection stays.
close: it ends the connection, and accepts no other one that this peer makes by an older description. What it grants
later is told apart by the ranks: the owner's HELLO names the newest generation that the fence was about, and the writer
posts no WRITE into that or an older one."""


class TransportError(Exception):
    """Raised when a peer cannot be reached or memory cannot be had. The text is one sentence for people: what could not
    be done, where, and what to do about it."""


class MissingBackend(TransportError):  # noqa: N818 (what is wrong, not which kind of error)
    """Raised when an optional library is not installed; the sentence holds the command that installs it."""


class Ended(Value, frozen=True, gc=False):
    """The end of a WRITE or READ. `ok`: all its bytes have landed (done_means remote) or left (local)."""

    op: int
    ok: bool


class Stopped(Value, frozen=True, gc=False):
    """The end of a stopped operation of which nothing had been posted: no byte has moved, no notice will come."""

    op: int


class WordArrived(Value, frozen=True, gc=False):
    """The value that `read_word` found; None if the peer could not be asked."""

    op: int
    value: int | None


class NotificationArrived(Value, frozen=True, gc=False):
    """A peer's notice, which arrives behind the bytes of its WRITE."""

    peer: Address
    notification: bytes


class Fenced(Value, frozen=True, gc=False):
    peer: Address


class Flushed(Value, frozen=True, gc=False):
    """The end of a flush; flushes of one peer end in their order. `ok`: every WRITE that was posted to this peer before
    the flush, behind the last fence of it, and reported as done, has landed. False: one may not have, or there is no
    connection."""

    peer: Address
    ok: bool


class PeerGone(Value, frozen=True, gc=False):
    """The event that a connection with this peer has broken; there is none any more in either direction, and nothing of
    the peer moves here.

    A side that finds its own broken ends the other one as well, so both sides learn that they must connect anew.
    """

    peer: Address


TransportEvent: TypeAlias = Ended | Stopped | WordArrived | NotificationArrived | Fenced | Flushed | PeerGone
EventSink: TypeAlias = Callable[[TransportEvent], None]


class Transport(Protocol):
    """The transport's agent of one rank. `run` must be running before anybody connects, in either direction."""

    @property
    def name(self) -> str: ...

    @property
    def done_means(self) -> DoneMeans: ...

    @property
    def fences(self) -> Fences: ...

    def allocate(self, nbytes: int) -> memoryview:
        """Allocate this agent's region, once, and return it: writable, aligned to a page. It stays readable and
        writable after `aclose`.

        TransportError if the machine has not so much to give.
        """

    def describe(self) -> bytes:
        """Return all that a peer needs to reach this region, a secret among it: pass it on where only peers can
        read."""

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve, until `aclose` or cancellation."""

    async def connect(self, peer: Address, description: bytes) -> None:
        """Connect to the agent that this description is of, unless it is connected already. TransportError if it is not
        there."""

    def write(
        self, op: int, peer: Address, pieces: Sequence[Descriptor], generation: int, notification: bytes | None
    ) -> None:
        """Copy pieces of this region (sources) into the peer's (targets), then deliver `notification` to the peer.

        A notice has at most 64 KiB.
        """

    def read(self, op: int, peer: Address, pieces: Sequence[Descriptor]) -> None:
        """Copy pieces of the peer's region (sources) into this one (targets)."""

    def read_word(self, op: int, peer: Address, address: int) -> None:
        """Read 8 bytes of the peer's region, a little-endian number at a multiple of 8."""

    def stop(self, op: int) -> None:
        """Post no more of this operation. It ends in Stopped if nothing had been posted, else as any other."""

    def flush(self, peer: Address) -> None:
        """Report Flushed once everything posted to this peer before has landed, been refused, or been lost."""

    def fence(self, peer: Address, newest_generation: int) -> None:
        """Report Fenced once nothing moves between this peer and us that was posted before; see the promises above.

        Waits for the peer only where a WRITE of ours is still unanswered: for its answer or the end of its process.
        """

    def forget(self, peer: Address) -> None:
        """Close all connections with a peer that is proved dead or no longer wanted. Open operations fail."""

    async def aclose(self) -> None:
        """End `run`, and remove whatever others could see of this agent. Open operations fail."""


class MakeTransport(Protocol):
    """A factory of the transport of one rank, given the rank's address and the sink of its events.

    It declares what those that it makes declare, since endpoints are configured by that before any transport is made.
    """

    @property
    def done_means(self) -> DoneMeans: ...

    @property
    def fences(self) -> Fences: ...

    def __call__(self, me: Address, on_event: EventSink, /) -> Transport: ...
