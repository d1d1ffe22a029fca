"""The base of transports whose bytes a library fetches: memory registered with it, words beside it, streams for
messages.

The receiver fetches, by the library's READ. A subclass says which library, and how it fetches.
"""

from __future__ import annotations

import contextlib
import mmap
import socket
from abc import abstractmethod
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from pdflow.protocol.values import Address
from pdflow_runtime.transports.base import EventSink, TransportError
from pdflow_runtime.transports.copying import Mapped, Motion, RegionBase
from pdflow_runtime.transports.moving import FetchingAgent
from pdflow_runtime.transports.streams.links import AgentLink, Remote
from pdflow_runtime.transports.streams.messages import VERSION, WORD_BYTES, AgentHello, Description, PackedPieces
from pdflow_runtime.transports.streams.over_tcp import TcpStreams
from pdflow_runtime.transports.streams.sockets import listening, tune

DRAM: Final = ""
MOST_DIGITS: Final = 3
"""The most digits of a GPU's number."""
WORD_SLOTS: Final = 512
"""Words that can be on their way to us at once: a page of them."""


class MemoryTable(NamedTuple):
    """A table of pieces of memory on one device."""

    device: str
    rows: Any
    """[N, 3]: address, length, GPU. Pieces of no length are left out."""


class RemoteMemory:
    """A peer's memory as the library reaches it."""

    __slots__ = ("address", "device", "name", "nbytes")

    def __init__(self, name: str, address: int, nbytes: int, device: str) -> None:
        self.device: Final = device
        """A GPU's number, or DRAM."""
        self.name: Final = name
        self.address: Final = address
        self.nbytes: Final = nbytes


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
    """An agent whose memory is registered with a library that fetches. Args: `host`, an address of this machine that
    peers can reach, for the streams of messages."""

    def __init__(self, me: Address, on_event: EventSink, host: str = "127.0.0.1") -> None:
        super().__init__(me, on_event)
        self._host: Final = host
        self._port = 0
        self._agent_metadata = b""
        self._whole = memoryview(b"")
        """The region, and the words behind it."""
        self._device = DRAM
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
            raise TransportError(f"a region of {nbytes} bytes cannot be had")
        words_at = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            # Words of its own, and of one that joins.
            whole = mmap.mmap(-1, words_at + 2 * WORD_SLOTS * WORD_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise TransportError(f"{nbytes >> 20:,} MiB of memory cannot be had: {error.strerror}") from None
        with contextlib.suppress(OSError):  # A kernel without them.
            # A READ of another process's memory has the kernel look up each page.
            whole.madvise(mmap.MADV_HUGEPAGE)
        return self._over(memoryview(whole), Mapped(memoryview(whole)[:nbytes]), words_at)

    def join(self, owner: RegisteredAgent) -> memoryview:
        """Use another agent's region as this one's, too."""
        assert isinstance(owner._memory, Mapped), "allocate comes first"
        return self._over(owner._whole, owner._memory, len(owner._whole) - WORD_SLOTS * WORD_BYTES)

    def _over(self, whole: memoryview, memory: Mapped, words_at: int) -> memoryview:
        self._own(memory, np.frombuffer(whole, "<u8", WORD_SLOTS, words_at))
        self._whole = whole
        self._agent_metadata = self._register(whole, memory.address)
        return memory.view

    def _own(self, memory: RegionBase, word_buffer: Any) -> None:
        assert self._memory is None, "one region per agent"
        self._memory, self._word_buffer = memory, word_buffer
        self._listener = listening(self._host)
        self._port = self._listener.getsockname()[1]

    def describe(self) -> bytes:
        assert self._memory is not None, "allocate comes first"
        nbytes, address = self._memory.nbytes, self._memory.address
        return msgspec.msgpack.encode(
            Description(
                self.name,
                self.incarnation,
                self.token,
                self._host,
                self._port,
                self._device,
                nbytes,
                address,
                self._agent_metadata,
            )
        )

    def _hello(self, description: Description) -> AgentHello:
        assert self._memory is not None
        nbytes, address = self._memory.nbytes, self._memory.address
        return AgentHello(
            VERSION,
            self.me,
            self.incarnation,
            description.incarnation,
            description.token,
            self._device,
            nbytes,
            address,
            self._agent_metadata,
        )

    def _reach(self, description: Description, hello: AgentHello) -> RemoteMemory:
        return self._remote(description)

    def _admit(self, hello: AgentHello, sock: socket.socket) -> RemoteMemory:
        tune(sock)
        return self._remote(hello)

    def _remote(self, description: Description | AgentHello) -> RemoteMemory:
        if description.memory and not (description.memory.isdecimal() and len(description.memory) <= MOST_DIGITS):
            raise TransportError("its memory is nowhere")
        if description.address < 0:
            raise TransportError(f"its memory cannot begin at {description.address}")
        return RemoteMemory(self._add(description.agent), description.address, description.nbytes, description.memory)

    def _motion(self, owner: object, peer: Address, generation: int, remote: Remote, pieces: PackedPieces) -> Motion:
        assert isinstance(remote, RemoteMemory)
        assert self._memory is not None
        sources, targets, lengths = pieces.columns()
        theirs = _table(remote.device, remote.address, sources, lengths)
        ours = _table(self._device, self._memory.address, targets, lengths)
        return self._fetch(owner, peer, generation, remote, theirs, ours)

    # Words are fetched like everything else, into a place of their own.

    def _post_word(self, op: int, link: AgentLink, address: int) -> None:
        assert isinstance(link.remote, RemoteMemory)
        if address % WORD_BYTES or address + WORD_BYTES > link.remote.nbytes:
            self._word_arrived(link, op, None)
            return
        self._last_slot = slot = (self._last_slot + 1) % WORD_SLOTS
        length = np.array([WORD_BYTES], np.uint64)
        target = _table(DRAM, self._word_buffer.ctypes.data, length * np.uint64(slot), length)
        source = _table(link.remote.device, link.remote.address, np.array([address], np.uint64), length)
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


def _table(device: str, base: int, offsets: Any, lengths: Any) -> MemoryTable:
    table = np.empty((len(lengths), 3), np.uint64)
    np.add(offsets, np.uint64(base), out=table[:, 0])
    table[:, 1] = lengths
    table[:, 2] = int(device or 0)
    return MemoryTable(device, table[table[:, 1] > 0])
