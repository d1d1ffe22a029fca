"""The base of transports whose bytes a library fetches: memory registered with it, words beside it, streams for
messages.

The receiver fetches, by the library's READ. A subclass says which library, and how it fetches.
"""

from __future__ import annotations

import contextlib
import mmap
import socket
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from pdflow.protocol.values import Address
from pdflow.protocol.wire.malformed import Malformed
from pdflow_runtime.security.tls import Tls
from pdflow_runtime.transports.adopting import AdoptedRegion
from pdflow_runtime.transports.base import EventSink, TransportError
from pdflow_runtime.transports.copying import Mapped, Motion
from pdflow_runtime.transports.moving import FetchingAgent
from pdflow_runtime.transports.segments import DescribedSegment, DescribedSegments, SegmentMap, parse_segments
from pdflow_runtime.transports.streams.links import AgentLink, Remote
from pdflow_runtime.transports.streams.messages import WORD_BYTES, AgentHello, Description, PackedPieces
from pdflow_runtime.transports.streams.over_tcp import TcpStreams
from pdflow_runtime.transports.streams.sockets import listening, tune

WORD_SLOTS: Final = 512
"""Words that can be on their way to us at once: a page of them."""


class MemoryTable(NamedTuple):
    """A table of pieces of memory."""

    on_gpu: Any
    """[N] of bool."""
    rows: Any
    """[N, 3]: address, length, the GPU's number or 0. Pieces of no length are left out."""

    def of(self, chosen: Any) -> MemoryTable:
        return MemoryTable(self.on_gpu[chosen], self.rows[chosen])


class RemoteMemory:
    """A peer's memory as the library reaches it."""

    __slots__ = ("extent", "name")

    def __init__(self, name: str, extent: SegmentMap) -> None:
        self.name: Final = name
        self.extent: Final = extent


class LibraryFetch(Motion):
    """A READ by the library; `local` is the library's engine or agent here."""

    __slots__ = ("_local", "_sources", "_targets", "remote")

    def __init__(
        self,
        owner: object,
        peer: str,
        generation: int,
        local: Any,
        remote: RemoteMemory,
        sources: MemoryTable,
        targets: MemoryTable,
    ) -> None:
        super().__init__(owner, peer, generation)
        self.remote: Final = remote
        self._local, self._sources, self._targets = local, sources, targets


class RegisteredAgent(TcpStreams, FetchingAgent):
    """An agent whose memory is registered with a library that fetches: only messages go by streams."""

    def __init__(self, me: Address, on_event: EventSink, host: str = "127.0.0.1", tls: Tls | None = None) -> None:
        super().__init__(me, on_event, host, tls)
        self._port = 0
        self._agent_metadata = b""
        self._whole = memoryview(b"")
        """The region, and the words behind it."""
        self._segments: DescribedSegments
        self._map: SegmentMap
        self._word_buffer: Any = None
        """The buffer in which words arrive, [WORD_SLOTS] of uint64; it is registered with the region, and described to
        no peer."""
        self._slots: dict[int, int] = {}
        """By operation, the slot of the buffer in which its word arrives."""
        self._last_slot = 0

    # What the library does.

    @abstractmethod
    def _register(self, whole: memoryview, address: int) -> bytes:
        """Register this memory with the library, and return what peers need to reach it. TransportError."""

    @abstractmethod
    def _add(self, metadata: bytes) -> str:
        """Make a peer known to the library by the peer's metadata, and return the library's name of it.
        TransportError."""

    @abstractmethod
    def _fetch(
        self,
        owner: object,
        peer: Address,
        generation: int,
        remote: RemoteMemory,
        sources: MemoryTable,
        targets: MemoryTable,
    ) -> Motion:
        """Return a READ by the library, not begun yet."""

    # Memory, and how peers learn of it.

    def allocate(self, nbytes: int) -> memoryview:
        if nbytes <= 0:
            raise TransportError(f"cannot allocate a region of {nbytes} bytes")
        whole, words_at = with_words(nbytes)
        return self._over(whole, Mapped(whole[:nbytes]), words_at)

    def join(self, owner: RegisteredAgent) -> memoryview:
        """Use another agent's region as this one's, too."""
        assert isinstance(owner._memory, Mapped | AdoptedRegion), "call allocate first"
        return self._over(owner._whole, owner._memory, len(owner._whole) - WORD_SLOTS * WORD_BYTES)

    def _over(self, whole: memoryview, memory: Mapped | AdoptedRegion, words_at: int) -> memoryview:
        """Have this region, with memory of ours that holds, or lies behind, all of it that is ours."""
        assert self._memory is None, "an agent has one region"
        self._memory, self._whole = memory, whole
        self._word_buffer = np.frombuffer(whole, "<u8", WORD_SLOTS, words_at)
        self._listener = listening(self._host)
        self._port = self._listener.getsockname()[1]
        self._agent_metadata = self._register(whole, Mapped(whole).address)
        if isinstance(memory, AdoptedRegion):
            self._segments, self._map, ours = memory.described, memory.map, memory.own
        else:
            self._segments = (DescribedSegment(0, memory.nbytes, memory.address),)
            self._map, ours = SegmentMap(self._segments), memory.view
        return ours

    def describe(self) -> bytes:
        assert self._memory is not None, "call allocate first"
        return msgspec.msgpack.encode(
            Description(
                self.name,
                self.incarnation,
                self.token,
                self._host,
                self._port,
                "",
                self._memory.nbytes,
                self._agent_metadata,
                self._segments,
            )
        )

    def _hello(self, description: Description) -> AgentHello:
        assert self._memory is not None
        return msgspec.structs.replace(
            super()._hello(description),
            nbytes=self._memory.nbytes,
            agent=self._agent_metadata,
            segments=self._segments,
        )

    def _reach(self, description: Description, hello: AgentHello) -> RemoteMemory:
        return self._remote(description)

    def _admit(self, hello: AgentHello, sock: socket.socket) -> RemoteMemory:
        tune(sock)
        return self._remote(hello)

    def _remote(self, description: Description | AgentHello) -> RemoteMemory:
        extent = parse_segments(description.segments, description.nbytes)
        if isinstance(extent, Malformed):
            raise TransportError(f"the peer's description has {extent.reason}")
        return RemoteMemory(self._add(description.agent), extent)

    def _motion(self, owner: object, peer: Address, generation: int, remote: Remote, pieces: PackedPieces) -> Motion:
        assert isinstance(remote, RemoteMemory)
        assert self._memory is not None
        sources, targets, lengths = pieces.columns()
        theirs = _table(remote.extent, sources, lengths)
        ours = _table(self._map, targets, lengths)
        return self._fetch(owner, peer, generation, remote, theirs, ours)

    # Words are fetched like everything else, into a place of their own.

    def _post_word(self, op: int, link: AgentLink, address: int) -> None:
        assert isinstance(link.remote, RemoteMemory)
        extent = link.remote.extent
        if address % WORD_BYTES or address + WORD_BYTES > extent.nbytes or extent.is_crossed([address], [WORD_BYTES]):
            self._word_arrived(link, op, None)
            return
        self._last_slot = slot = (self._last_slot + 1) % WORD_SLOTS
        length = np.array([WORD_BYTES], np.uint64)
        at = self._word_buffer.ctypes.data + slot * WORD_BYTES
        target = MemoryTable(np.zeros(1, bool), np.array([[at, WORD_BYTES, 0]], np.uint64))
        source = _table(extent, np.array([address], np.uint64), length)
        link.word_reads.add(op)
        self._slots[op] = slot
        link.motions.append((op, self._fetch(link, link.peer, -1, link.remote, source, target)))
        link.bell.set()

    def _read_over(self, op: int, link: AgentLink, landed: bool) -> None:
        if op in link.word_reads:
            self._word_arrived(link, op, int(self._word_buffer[self._slots[op]]) if landed else None)
        else:
            self._ended(link, op, landed)

    def _word_arrived(self, link: AgentLink, op: int, value: int | None) -> None:
        self._slots.pop(op, None)
        super()._word_arrived(link, op, value)


def with_words(nbytes: int) -> tuple[memoryview, int]:
    """Return memory of this process that is registered as a whole, and where in it the words arrive that its agent
    reads, and then those of one that joins: in the first page behind so many bytes. TransportError."""
    words_at = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    try:
        whole = mmap.mmap(-1, words_at + 2 * WORD_SLOTS * WORD_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise TransportError(f"cannot allocate {nbytes >> 20:,} MiB of memory: {error.strerror}") from None
    with contextlib.suppress(OSError):  # A kernel without them.
        # A READ of another process's memory has the kernel look up each page.
        whole.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(whole), words_at


def of_one_kind(sources: MemoryTable, targets: MemoryTable) -> Iterator[tuple[MemoryTable, MemoryTable]]:
    """Yield the pieces in tables whose memory is of one kind: all on GPUs, or none."""
    if all(table.on_gpu.all() or not table.on_gpu.any() for table in (sources, targets)):
        yield sources, targets
        return
    kinds = 2 * sources.on_gpu + targets.on_gpu
    for kind in np.unique(kinds):
        chosen = kinds == kind
        yield sources.of(chosen), targets.of(chosen)


def _table(segments: SegmentMap, offsets: Any, lengths: Any) -> MemoryTable:
    rows = np.empty((len(lengths), 3), np.uint64)
    rows[:, 0], gpus = segments.addresses(offsets)
    rows[:, 1] = lengths
    rows[:, 2] = np.maximum(gpus, 0)
    table, filled = MemoryTable(gpus >= 0, rows), lengths > 0
    return table if filled.all() else table.of(filled)
