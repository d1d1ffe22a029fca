"""Staging buffers: what NCCL sends from and receives into, and how bytes come there from a region and back.

Two kinds. In front of the stand-in the buffer is memory of this process, and so is the region; the CPU copies pieces.
In front of NCCL itself the buffer is memory of the GPU. Kernels gather pieces into it and scatter them out of it, from
and into VRAM, or host memory that is pinned: both are tensors to them, and no byte is copied by the CPU.

All work on a staging buffer runs in the order of its own stream, and waits for no other stream. So a region's bytes
must be there before a transfer of them is posted: the engine that posts it has waited for the event of the kernels that
wrote them.
"""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from typing import Any, Final, Protocol

import numpy as np
import trio

from pdflow_runtime.gpu.memory import pinned, tensor_at
from pdflow_runtime.gpu.pieces import copy_rows, gather_rows, rows_of
from pdflow_runtime.transports.adopting import AdoptedRegion, Segment
from pdflow_runtime.transports.base import TransportError
from pdflow_runtime.transports.copying import Copy, Mapped, Motion, RegionBase
from pdflow_runtime.transports.nccl.standin import StandInStream
from pdflow_runtime.transports.streams.messages import WORD_BYTES, PackedPieces

CHUNK_BYTES: Final = 4 << 20
"""The size of the stand-in's buffers."""
GPU_CHUNK_BYTES: Final = 32 << 20
"""The size of a buffer on a GPU. A chunk costs some 0.2 ms besides the time of its bytes, which is 0.1 ms over NVLink
and 0.7 ms over PCIe; each group has a buffer, and while it scatters one more of this size."""


class NcclStaging(Protocol):
    """A staging buffer. One thread at a time uses it."""

    @property
    def nbytes(self) -> int:
        """Its size: the chunks in which bodies go. Both ranks of a group have the same."""

    @property
    def address(self) -> int:
        """The address of the buffer for NCCL."""

    @property
    def stream(self) -> Any:
        """The stream on which NCCL moves bytes from and into the buffer."""

    def attach(self) -> None:
        """Make the buffer's GPU the one of this thread."""

    def mark(self) -> None:
        """Note what is on the stream."""

    def left(self) -> int:
        """Return 0 if all that was on the stream at the last mark is done; else a number that may tell how much is
        not. Does not wait. RuntimeError if it has failed."""

    def gather(self, memory: RegionBase, pieces: PackedPieces) -> Motion:
        """Return the copy of these pieces of a region to the beginning of the buffer, in which they lie one behind the
        other."""

    def scatter(self, memory: RegionBase, pieces: PackedPieces) -> Motion:
        """Return the copy of such pieces from the buffer into a region."""


class HostStaging:
    """The staging buffer of the stand-in, which reaches this process's memory."""

    nbytes: Final = CHUNK_BYTES

    def __init__(self) -> None:
        self.host: Final = Mapped(memoryview(mmap.mmap(-1, CHUNK_BYTES)))
        self.address: Final = self.host.address
        self.stream: Final = StandInStream()

    def attach(self) -> None:
        pass

    def mark(self) -> None:
        pass

    def left(self) -> int:
        return self.stream.left()

    def gather(self, memory: RegionBase, pieces: PackedPieces) -> Copy:
        assert isinstance(memory, Mapped)
        return Copy(self, "", 0, memory, self.host, pieces)

    def scatter(self, memory: RegionBase, pieces: PackedPieces) -> Copy:
        assert isinstance(memory, Mapped)
        return Copy(self, "", 0, self.host, memory, pieces)


class KernelDevice(Protocol):
    """A device, and the memory that its kernels reach as tensors of uint8. TransportError where that is none."""

    def over_vram(self, address: int, nbytes: int) -> Any:
        """Return a tensor over memory of the device."""

    def over_host(self, memory: memoryview) -> Any:
        """Return a tensor over memory of this process, as the device's kernels reach it."""

    def staging(self) -> RowStaging: ...


class TensorRegion(AdoptedRegion):
    """A region that kernels of one device reach: segments, and memory of the agent's own behind them."""

    __slots__ = ("_starts", "device", "tensors")

    def __init__(self, segments: Sequence[Segment], own: memoryview, device: KernelDevice) -> None:
        super().__init__(segments, own)
        self.device: Final = device
        self._starts: Final = np.array(self.map.starts, np.uint64)
        for number, segment in enumerate(segments):
            if segment.address % WORD_BYTES:  # Rows are copied in words.
                raise TransportError(
                    f"cannot adopt segment {number}, which begins at {segment.address:#x}: over nccl a segment begins "
                    f"at a multiple of {WORD_BYTES}"
                )
        self.tensors: Final = [
            device.over_vram(segment.address, segment.nbytes) if view is None else device.over_host(view)
            for segment, view in zip(self.described, self.host_views, strict=False)
        ]

    def tensors_of(self, offsets: Any) -> Iterator[tuple[Any, Any, Any]]:
        """Yield the segments that these offsets lie in: the tensor over each, which of them do, and where in it. Arrays
        of u64."""
        index = np.searchsorted(self._starts, offsets, "right") - 1
        for number in np.unique(index):
            chosen = index == number
            yield self.tensors[number], chosen, offsets[chosen] - self._starts[number]


class RowStaging(ABC):
    """A staging buffer on a device, whose kernels gather and scatter."""

    buffer: Any
    """A tensor of uint8 `[nbytes]`."""

    @property
    def nbytes(self) -> int:
        return len(self.buffer)

    @property
    def address(self) -> int:
        return int(self.buffer.data_ptr())

    @property
    @abstractmethod
    def stream(self) -> Any: ...

    @abstractmethod
    def attach(self) -> None: ...

    @abstractmethod
    def mark(self) -> None: ...

    @abstractmethod
    def left(self) -> int: ...

    @abstractmethod
    def on_stream(self) -> AbstractContextManager[Any]:
        """Have torch put kernels on the buffer's stream, in this thread."""

    @abstractmethod
    def finish(self) -> None:
        """Wait for all that is on the buffer's stream. Only while none of NCCL's kernels is, which may wait for
        ever."""

    def gather(self, memory: RegionBase, pieces: PackedPieces) -> RowCopy:
        assert isinstance(memory, TensorRegion)
        return RowCopy(self, memory, pieces, gathers=True)

    def scatter(self, memory: RegionBase, pieces: PackedPieces) -> RowCopy:
        assert isinstance(memory, TensorRegion)
        return RowCopy(self, memory, pieces, gathers=False)


class RowCopy(Motion):
    """A copy of pieces by kernels, between a region and the staging buffer. It has ended when the kernels have."""

    __slots__ = ("_gathers", "_memory", "_pieces", "_staging")

    def __init__(self, staging: RowStaging, memory: TensorRegion, pieces: PackedPieces, *, gathers: bool) -> None:
        super().__init__(staging, "", 0)
        self._staging: Final = staging
        self._memory: Final = memory
        self._pieces: Final = pieces
        self._gathers: Final = gathers

    async def run(self) -> None:
        await trio.to_thread.run_sync(self._copy)  # Not abandoned: it runs until no byte moves any more.

    def _copy(self) -> None:
        staging = self._staging
        with gpu_errors("kernels could not copy KV"):
            staging.attach()
            try:
                with staging.on_stream():
                    self._post()
            finally:
                staging.finish()

    def _post(self) -> None:
        sources, targets, lengths = self._pieces.columns()
        ours = sources if self._gathers else targets
        spread = list(self._memory.tensors_of(ours))
        for tensor, chosen, within in spread:
            if not self._gathers:
                self._copy_rows(self._staging.buffer, tensor, sources[chosen], within, lengths[chosen])
            elif len(spread) > 1:
                self._copy_rows(tensor, self._staging.buffer, within, targets[chosen], lengths[chosen])
            else:
                self._gather_rows(tensor, within, targets, lengths)

    def _copy_rows(self, source: Any, target: Any, at: Any, to: Any, lengths: Any) -> None:
        for rows in rows_of(at, to, lengths):
            if self.halted:
                return
            copy_rows(source, target, rows)

    def _gather_rows(self, source: Any, at: Any, to: Any, lengths: Any) -> None:
        """Copy pieces of one segment, which are the buffer's contents in their order, without a copy in between."""
        done = 0
        for rows in rows_of(at, to, lengths):
            if self.halted:
                return
            gather_rows(source, self._staging.buffer[done:], rows)
            done += len(rows.sources) * rows.nbytes


class CudaDevice:
    """A GPU of this process, by its number."""

    def __init__(self, gpu: int) -> None:
        self._gpu: Final = gpu

    def over_vram(self, address: int, nbytes: int) -> Any:
        with gpu_errors(f"cannot use memory of GPU {self._gpu}"):
            return tensor_at(address, nbytes, f"cuda:{self._gpu}")

    def over_host(self, memory: memoryview) -> Any:
        with gpu_errors(f"cannot pin {len(memory) >> 20:,} MiB of memory for GPU {self._gpu}"):
            return pinned(memory, self._gpu)

    def staging(self) -> CudaStaging:
        return CudaStaging(self._gpu)


class CudaStaging(RowStaging):
    """A staging buffer on a GPU. TransportError if the GPU cannot be used, or has no memory left."""

    def __init__(self, gpu: int) -> None:
        self._gpu: Final = gpu
        with gpu_errors(f"cannot make a buffer of {GPU_CHUNK_BYTES >> 20} MiB on GPU {gpu}"):
            torch: Any = import_module("torch")
            self._torch: Final = torch
            # Of another priority than the engine's: torch hands out its 32 streams of each again, and one of NCCL's
            # kernels may wait for ever on this one.
            self._cuda_stream: Final = torch.cuda.Stream(gpu, priority=-1)
            self._done: Final = torch.cuda.Event()
            # Allocated on its stream, it is given to nobody else before what is there has ended.
            with self.on_stream():
                self.buffer = torch.empty(GPU_CHUNK_BYTES, dtype=torch.uint8, device=f"cuda:{gpu}")

    @property
    def stream(self) -> int:
        found: int = self._cuda_stream.cuda_stream
        return found

    def attach(self) -> None:
        self._torch.cuda.set_device(self._gpu)

    def mark(self) -> None:
        self._done.record(self._cuda_stream)

    def left(self) -> int:
        return 0 if self._done.query() else 1

    def on_stream(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._torch.cuda.stream(self._cuda_stream)
        return context

    def finish(self) -> None:
        self._cuda_stream.synchronize()


@contextmanager
def gpu_errors(what: str) -> Iterator[None]:
    """Raise TransportError, in one sentence, for whatever torch or the driver raises."""
    try:
        yield
    # torch built for the CPU asserts that it is not; what the driver refuses, and memory that is used up, are
    # RuntimeErrors of several lines.
    except (AssertionError, RuntimeError, ImportError) as error:
        reason = (str(error) or type(error).__name__).strip().splitlines()[0]
        raise TransportError(f"{what}: {reason}") from None
