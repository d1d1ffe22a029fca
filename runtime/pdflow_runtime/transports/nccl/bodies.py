"""The bodies of one group, which go through it one after the other, and the landing of each that is received.

A chunk at a time: gathered into the staging buffer, sent, received, and scattered by its receiver, which checks before
each chunk whether it is still wanted. What is not stays in the buffer.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any, Final

import numpy as np
import trio

from pdflow_runtime.transports.base import TransportError
from pdflow_runtime.transports.copying import Motion, RegionBase
from pdflow_runtime.transports.nccl.groups import NcclGroup
from pdflow_runtime.transports.nccl.staging import NcclStaging
from pdflow_runtime.transports.segments import Extent
from pdflow_runtime.transports.streams.messages import PackedPieces
from pdflow_runtime.transports.streams.sockets import is_whole
from pdflow_runtime.transports.streams.stream import MAX_OUTGOING, SocketStream, StreamBrokenError

log = logging.getLogger(__name__)

MAX_BODIES: Final = MAX_OUTGOING
"""The most bodies that wait to go through one group; beyond it the peer takes part in none of what it asks for or
announces."""
LOOK_S: Final = 0.02
"""The interval of checks whether the other side of a body is still there."""
CLOSE_S: Final = 10.0
"""The time that NCCL has to free a group. After it, the connection is closed without waiting any longer."""


class NcclReceive(Motion):
    """The motion of a body that is received. Halted, it ends at once, unless it is being scattered; its bytes come all
    the same."""

    __slots__ = ("_copy", "over")

    def __init__(self, owner: object, peer: str, generation: int) -> None:
        super().__init__(owner, peer, generation)
        self.over: Final = trio.Event()
        self._copy: Motion | None = None

    def halt(self) -> None:
        super().halt()
        if self._copy is None:
            self.over.set()
        else:
            self._copy.halt()

    async def run(self) -> None:
        await self.over.wait()

    async def scatter(self, copy: Motion) -> None:
        if self.halted:
            return
        self._copy = copy
        await copy.run()
        self._copy = None
        if self.halted:
            self.over.set()


class Bodies:
    """The bodies that go through one group, one after the other. Another stream announces them."""

    def __init__(self, extent: Extent, label: str, group: NcclGroup, stage: Callable[[], NcclStaging]) -> None:
        self.extent: Final = extent
        """The bounds of the peer's memory."""
        self._label: Final = label
        self._group: Final = group
        self._stage: Final = stage
        self._staging: NcclStaging | None = None
        self._waiting: deque[tuple[PackedPieces | int, NcclReceive | None]] = deque()
        self._bell = trio.Event()
        self._called = trio.Event()
        """Set while a thread waits for NCCL."""
        self._limiter: Final = trio.CapacityLimiter(1)
        self._over = False

    def send(self, pieces: PackedPieces) -> None:
        self._put(pieces, None)

    def receive(self, nbytes: int, pieces: PackedPieces | None, landing: NcclReceive | None) -> None:
        """Receive a body into these pieces, or discard it if there are none. StreamBrokenError, as `send`, if too many
        wait."""
        self._put(nbytes if pieces is None else pieces, landing)

    def _put(self, what: PackedPieces | int, landing: NcclReceive | None) -> None:
        if self._over:
            raise StreamBrokenError("the NCCL group of this connection has been aborted")
        if len(self._waiting) >= MAX_BODIES:
            raise StreamBrokenError(f"{MAX_BODIES} announced transfers wait for the peer, which is the limit")
        self._waiting.append((what, landing))
        self._bell.set()

    def abort(self) -> None:
        self._group.abort()

    async def run(self, stream: SocketStream, memory: RegionBase) -> None:
        """Move the bodies. Returns when NCCL or the GPU has failed, or either side has given up; NCCL has freed the
        group then."""
        why: object = "one side closed the connection"
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch, stream, nursery.cancel_scope)
                try:
                    await self._move_all(memory)
                except (RuntimeError, TransportError) as error:
                    why = error
                    nursery.cancel_scope.cancel()
            log.warning("%s: a transfer was lost: %s", self._label, why)
        finally:
            self._over = True
            self.abort()
            for _, landing in self._waiting:
                if landing is not None:
                    landing.failed = not landing.halted
                    landing.over.set()
            with trio.move_on_after(CLOSE_S, shield=True):
                await trio.to_thread.run_sync(self._close, abandon_on_cancel=True)

    async def _move_all(self, memory: RegionBase) -> None:
        while True:
            while self._waiting:
                await self._move(*self._waiting[0], memory)
                self._waiting.popleft()
            self._bell = trio.Event()
            await self._bell.wait()

    async def _move(self, what: PackedPieces | int, landing: NcclReceive | None, memory: RegionBase) -> None:
        if self._staging is None:
            await self._call(self._open)
            self._staging = self._group.staging
        staging, most = self._staging, self._staging.nbytes
        if isinstance(what, int):
            for begin in range(0, what, most):
                await self._call(partial(self._group.receive, min(most, what - begin)))
        elif landing is None:
            sources, _, lengths = what.columns()
            for chunk in split(sources, lengths, most):
                await staging.gather(memory, chunk).run()
                await self._call(partial(self._group.send, chunk.nbytes))
        else:
            _, targets, lengths = what.columns()
            for chunk in split(targets, lengths, most, into_region=True):
                await self._call(partial(self._group.receive, chunk.nbytes))
                await landing.scatter(staging.scatter(memory, chunk))
            landing.over.set()

    def _open(self) -> None:
        self._group.open(self._stage())

    def _close(self) -> None:
        try:
            self._group.close()
        except RuntimeError as error:
            log.warning("%s: a group could not be freed: %s", self._label, error)

    async def _call(self, call: Callable[[], None]) -> None:
        """Wait for a call of the group in a thread. If this is cancelled the call is left alone: it touches no region,
        and ends when the group is aborted. RuntimeError, TransportError."""
        self._called.set()
        await trio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=self._limiter)
        self._called = trio.Event()

    async def _watch(self, stream: SocketStream, scope: trio.CancelScope) -> None:
        """Abort when the stream has ended: NCCL waits for ever for a rank that is gone."""
        while True:
            await self._called.wait()
            while self._called.is_set():
                if not is_whole(stream.sock):
                    self.abort()
                    scope.cancel()
                    return
                await trio.sleep(LOOK_S)


def split(offsets: Any, lengths: Any, chunk_bytes: int, *, into_region: bool = False) -> Iterator[PackedPieces]:
    """Yield the copies from these offsets in a region into the staging buffer, or back, as much as it holds at once."""
    ends = np.cumsum(lengths)
    begins = ends - lengths
    total = int(ends[-1]) if len(ends) else 0
    borders = np.arange(0, total, chunk_bytes, dtype=np.uint64)
    boundaries = np.union1d(begins[lengths > 0], borders)
    sizes = np.diff(boundaries, append=np.uint64(total))
    piece = np.searchsorted(ends, boundaries, "right")
    positions = [offsets[piece] + boundaries - begins[piece], boundaries % np.uint64(chunk_bytes)]
    rows = np.stack((*(reversed(positions) if into_region else positions), sizes), axis=1)
    chunks = np.append(np.searchsorted(boundaries, borders), len(boundaries)).tolist()
    for first, last in pairwise(chunks):
        chunk = slice(first, last)
        yield PackedPieces(rows[chunk].tobytes(), int(sizes[chunk].sum()))
