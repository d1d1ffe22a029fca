"""The transport between GPUs of one host by CUDA IPC: peers map each other's allocations, and the receiver copies.

As over shm, a WRITE is a request which the owner of the target carries out, so `fences` is revoke and `done_means`
remote. Messages go over a Unix socket, to processes of the same user only. CUDA maps memory for writing, too, so peers
could write where they may not; over shm they could not.

The region is adopted: segments of one GPU, which an engine has allocated. Behind them lies the agent's own memory, for
lease words, a file that peers map for reading. Pieces lie in segments, and words in the agent's own memory, only.

Copies run on a CUDA stream of the agent's own, in a thread, and nothing on the GPU orders them with any other stream.
The order comes from the CPU, on both sides: P's engine has waited for the event behind the kernels that wrote a block
before the block is posted, and D's engine starts to read a block after its notification, which is reported when the
copy's event has been waited for. Even a small copy has a thread, since it may wait behind the engine's kernels for
milliseconds.
"""

from __future__ import annotations

import logging
import mmap
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NoReturn

import msgspec
import numpy as np
import trio

from pdflow.protocol.values import Address
from pdflow.protocol.wire.malformed import Malformed
from pdflow_runtime.gpu.driver import HANDLE_BYTES, GpuError, gpus
from pdflow_runtime.gpu.ipc import Allocations, CopyStream, allocations
from pdflow_runtime.gpu.pieces import rows_of
from pdflow_runtime.transports.adopting import AdoptedRegion, Segment
from pdflow_runtime.transports.base import EventSink, MissingBackend, TransportError, WordArrived
from pdflow_runtime.transports.copying import Motion, RegionBase
from pdflow_runtime.transports.moving import FetchingAgent
from pdflow_runtime.transports.region import FOLDER, OwnedRegion, map_region, sweep
from pdflow_runtime.transports.segments import MAX_SEGMENTS, DescribedSegment, SegmentMap
from pdflow_runtime.transports.streams.links import AgentLink, Guest, Remote
from pdflow_runtime.transports.streams.messages import (
    AgentHello,
    Description,
    PackedPieces,
    ReadOver,
    ReadRequest,
    ReadWordRequest,
    extent_of,
    word_at,
)
from pdflow_runtime.transports.streams.over_unix import UnixStreams, check_user
from pdflow_runtime.transports.streams.stream import OutgoingMessage, StreamBrokenError

log = logging.getLogger(__name__)


def require() -> None:
    """Raise MissingBackend if there is no GPU."""
    if not gpus():
        raise MissingBackend("the transport 'cuda-ipc' needs a GPU, and CUDA's driver finds none here; use shm or tcp")


class GpuRegion(RegionBase):
    """A region on a GPU, ours or a peer's, as this process reaches it. TransportError if its allocations cannot be
    opened, or are not as described."""

    __slots__ = ("_allocations", "_opened", "_words_at", "described", "handles", "map", "views", "words")

    def __init__(
        self, known: Allocations, described: Sequence[DescribedSegment], handles: Sequence[bytes], words: memoryview
    ) -> None:
        self.map: Final = SegmentMap(described[: len(handles)])
        super().__init__(described[-1].start + described[-1].nbytes, self.map)
        self.described: Final = tuple(described)
        """The segments, with offsets in their allocations for addresses; then the words, if there are any."""
        self.handles: Final = tuple(handles)
        """The handle of each segment's allocation."""
        self.words: Final = words
        self._words_at: Final = described[-1].start
        self._allocations: Final = known
        self._opened: Final[list[bytes]] = []
        self.views: Final[list[Any]] = []
        with ExitStack() as undo:
            undo.callback(self.close)
            for number, (segment, handle) in enumerate(zip(described, handles, strict=False)):
                self.views.append(self._view(number, segment, handle))
            undo.pop_all()

    def _view(self, number: int, segment: DescribedSegment, handle: bytes) -> Any:
        try:
            address, nbytes = self._allocations.open(handle)
        except GpuError as error:
            raise TransportError(f"segment {number} of a memory cannot be opened: {error}") from None
        self._opened.append(handle)
        if segment.address + segment.nbytes > nbytes:
            raise TransportError(
                f"segment {number} of a memory has {segment.nbytes:,} bytes from byte {segment.address:,} on of an "
                f"allocation of {nbytes:,}"
            )
        return self._allocations.device.view(address + segment.address, segment.nbytes)

    def word_value(self, address: int) -> int | None:
        """Return the word at this address; None where no word can be."""
        return word_at(self.words, address - self._words_at)

    def close(self) -> None:
        """Give up the allocations. No copy from them may be under way."""
        while self._opened:
            self._allocations.close(self._opened.pop())


class GpuCopy(Motion):
    """A copy between two regions by kernels, on the CUDA stream of an agent."""

    __slots__ = ("_attach", "_pieces", "_source", "_stream", "_target")

    def __init__(
        self,
        owner: object,
        peer: str,
        generation: int,
        source: GpuRegion,
        target: GpuRegion,
        pieces: PackedPieces,
        attach: Callable[[], None],
        stream: CopyStream,
    ) -> None:
        super().__init__(owner, peer, generation)
        self._source, self._target, self._pieces = source, target, pieces
        self._attach, self._stream = attach, stream

    async def run(self) -> None:
        if self._pieces.nbytes:
            await trio.to_thread.run_sync(self._copy)

    def _copy(self) -> None:
        try:
            self._attach()
            for source, target, columns in self._between_segments():
                for rows in rows_of(*columns):
                    if self.halted:
                        return
                    self._stream.copy(source, target, rows)()
        except RuntimeError as error:  # GpuError, and all that torch raises
            log.warning("a copy from %s on the GPU failed: %s", self.peer, error)
            self.failed = not self.halted

    def _between_segments(self) -> Iterator[tuple[Any, Any, Any]]:
        """Yield two segments, and the pieces between them: sources, targets and lengths."""
        source, target, columns = self._source, self._target, self._pieces.columns()
        if len(source.views) == len(target.views) == 1:
            yield source.views[0], target.views[0], columns
            return
        sides = ((source, columns[0]), (target, columns[1]))
        at, to = (np.array(region.map.indices(offsets.tolist())) for region, offsets in sides)
        pairs = at * MAX_SEGMENTS + to
        for pair in np.unique(pairs):
            one, other = divmod(int(pair), MAX_SEGMENTS)
            starts = np.array([[source.map.starts[one]], [target.map.starts[other]], [0]], np.uint64)
            yield source.views[one], target.views[other], columns[:, pairs == pair] - starts


class CudaIpcTransport(UnixStreams, FetchingAgent):
    """The transport over CUDA IPC. Args: `folder`, of a tmpfs; `share`, which returns the allocations that are shared
    on a GPU; tests use others."""

    name: Final = "cuda-ipc"

    def __init__(
        self,
        me: Address,
        on_event: EventSink,
        folder: Path = FOLDER,
        share: Callable[[int], Allocations] = allocations,
    ) -> None:
        super().__init__(me, on_event, folder)
        self._share: Final = share
        self._allocations: Allocations
        self._stream: CopyStream
        self._region: GpuRegion | None = None
        self._words_file: OwnedRegion
        self._is_owner = True
        self._remotes: set[GpuRegion] = set()
        """The memories of peers that are open."""

    def allocate(self, nbytes: int) -> NoReturn:
        raise TransportError(
            f"transport {self.name} moves only memory of GPUs, which an engine allocates, and {self.me} has none "
            'there; set kv_buffer_device = "cuda", or use another transport'
        )

    def adopt(self, segments: Sequence[Segment], own_bytes: int) -> memoryview:
        """Use memory of a GPU that somebody else has allocated; see `transports/adopting.py`."""
        on = {segment.gpu for segment in segments}
        if None in on:
            raise TransportError(f"{self.name} moves only memory of GPUs, and a segment lies in memory of the host")
        if len(on) > 1:
            listed = ", ".join(map(str, sorted(gpu for gpu in on if gpu is not None)))
            raise TransportError(f"an agent of {self.name} has memory on one GPU, and segments lie on GPUs {listed}")
        if own_bytes < 0:
            raise TransportError(f"cannot allocate a region of {own_bytes} bytes")
        sweep(self._folder)
        with ExitStack() as undo:
            own = OwnedRegion(own_bytes or mmap.PAGESIZE, self._folder)
            undo.callback(own.close)
            words = own.view[:own_bytes]
            adopted = AdoptedRegion(segments, words)
            region = self._exported(self._share(segments[0].gpu or 0), adopted)
            undo.pop_all()
        return self._over(region, own, own)

    def _exported(self, known: Allocations, adopted: AdoptedRegion) -> GpuRegion:
        with ExitStack() as exported:
            described, handles = list(adopted.described), []
            for number, segment in enumerate(adopted.adopted):
                try:
                    handle, offset = known.export(segment.address)
                except GpuError as error:
                    raise TransportError(
                        f"segment {number} cannot be shared with other processes: {error}; it must be memory of "
                        "cudaMalloc, so PyTorch's expandable_segments must be off"
                    ) from None
                exported.callback(known.close, handle)
                handles.append(handle)
                described[number] = DescribedSegment(described[number].start, segment.nbytes, offset)
            if len(adopted.own):
                described[-1] = DescribedSegment(described[-1].start, len(adopted.own))
            return GpuRegion(known, described, handles, adopted.own)

    def join(self, owner: CudaIpcTransport) -> memoryview:
        """Use another agent's region as this one's, too."""
        assert owner._region is not None, "call adopt first"
        self._is_owner = False
        return self._over(owner._region, owner._words_file, OwnedRegion(mmap.PAGESIZE, self._folder))

    def _over(self, region: GpuRegion, words_file: OwnedRegion, own: OwnedRegion) -> memoryview:
        assert self._region is None, "an agent has one region"
        self._memory = self._region = region
        self._allocations = region._allocations
        self._words_file = words_file
        self._allocations.device.attach()
        self._stream = self._allocations.device.stream()
        self._listen_beside(own)
        return region.words

    def describe(self) -> bytes:
        assert self._region is not None, "call adopt first"
        region, host = self._region, str(self._socket_path)
        return msgspec.msgpack.encode(
            Description(
                self.name,
                self.incarnation,
                self.token,
                host,
                0,
                str(self._words_file.path),
                region.nbytes,
                b"".join(region.handles),
                region.described,
            )
        )

    def _hello(self, description: Description) -> AgentHello:
        assert self._region is not None
        region = self._region
        return msgspec.structs.replace(
            super()._hello(description),
            memory=str(self._words_file.path),
            nbytes=region.nbytes,
            agent=b"".join(region.handles),
            segments=region.described,
        )

    def _reach(self, description: Description, hello: AgentHello) -> GpuRegion:
        return self._remote(description)

    def _admit(self, hello: AgentHello, sock: socket.socket) -> GpuRegion:
        check_user(sock)
        return self._remote(hello)

    def _remote(self, described: Description | AgentHello) -> GpuRegion:
        whole = extent_of(described)
        if isinstance(whole, Malformed):
            raise TransportError(f"the peer's description has {whole.reason}")
        segments, number = described.segments, len(described.agent) // HANDLE_BYTES
        # With one segment more than handles, the last one is of words.
        if not number or len(described.agent) % HANDLE_BYTES or len(segments) - number not in (0, 1):
            raise TransportError(
                f"the peer describes {len(segments)} segments by {len(described.agent):,} bytes of handles"
            )
        handles = [described.agent[HANDLE_BYTES * at : HANDLE_BYTES * (at + 1)] for at in range(number)]
        has_words = len(segments) > number
        words = map_region(described.memory, segments[-1].nbytes, self._folder) if has_words else memoryview(b"")
        remote = GpuRegion(self._allocations, segments, handles, words)
        self._remotes.add(remote)
        return remote

    def _let_be(self, remote: Remote | None) -> None:
        """Give up a peer's memory. Its stream has ended, and with it the tasks that ran copies from it."""
        if remote in self._remotes:
            assert isinstance(remote, GpuRegion)
            self._remotes.discard(remote)
            remote.close()

    def _hide(self) -> None:
        super()._hide()
        for remote in tuple(self._remotes):  # of links, whose tasks were cancelled
            self._let_be(remote)
        if self._region is not None and self._is_owner:
            self._region.close()

    def _serve_read(self, guest: Guest, message: ReadRequest | ReadWordRequest | ReadOver) -> OutgoingMessage:
        raise StreamBrokenError("the peer asked for bytes, which over cuda-ipc it must map")

    def _motion(self, owner: object, peer: Address, generation: int, remote: Remote, pieces: PackedPieces) -> GpuCopy:
        assert isinstance(remote, GpuRegion)
        assert self._region is not None
        attach = self._allocations.device.attach
        return GpuCopy(owner, peer, generation, remote, self._region, pieces, attach, self._stream)

    def _post_word(self, op: int, link: AgentLink, address: int) -> None:
        assert isinstance(link.remote, GpuRegion)
        self._on_event(WordArrived(op, link.remote.word_value(address)))
