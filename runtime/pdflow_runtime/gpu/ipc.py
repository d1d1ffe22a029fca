"""Allocations of GPUs that processes of one host share: exported, opened once each, and copied from.

CUDA opens no allocation of the process's own, and maps another's once in a process. So `Allocations` counts who uses
each, and closes it behind the last one. What it needs of CUDA is `IpcDevice`; tests have another one, without a GPU.

CUDA maps memory for reading and writing alike: a process that has a handle can write. Once the process that exported an
allocation has ended, its handle opens nothing; what was opened before stays mapped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, Final, Protocol

from pdflow_runtime.gpu import driver
from pdflow_runtime.gpu.driver import GpuError
from pdflow_runtime.gpu.memory import tensor_at
from pdflow_runtime.gpu.pieces import RowCopies, copy_rows

log = logging.getLogger(__name__)


class CopyStream(Protocol):
    """A stream of copies, which run in order, at the same time as other streams."""

    def copy(self, source: Any, target: Any, rows: RowCopies) -> Callable[[], None]:
        """Enqueue a copy between two views, and return what waits until it is over. RuntimeError, from either, if
        there is not enough memory or CUDA fails."""


class IpcDevice(Protocol):
    """One GPU, as far as memory of it is shared. Each call needs a thread that has attached, and raises GpuError."""

    def attach(self) -> None:
        """Make this GPU current in the calling thread."""

    def allocation(self, address: int) -> tuple[int, int]:
        """Return where the allocation begins that an address is in, and its size."""

    def export(self, address: int) -> bytes:
        """Return the handle of the allocation that an address is in, always the same one."""

    def open(self, handle: bytes) -> tuple[int, int]:
        """Map another process's allocation, and return its address here, and its size."""

    def close(self, address: int) -> None:
        """Unmap an allocation that was opened. No copy from it may be under way."""

    def view(self, address: int, nbytes: int) -> Any:
        """Return this memory as copies take it. It keeps nothing alive."""

    def stream(self) -> CopyStream: ...


class _Allocation:
    __slots__ = ("address", "is_own", "nbytes", "users")

    def __init__(self, address: int, nbytes: int, is_own: bool) -> None:
        self.address: Final = address
        self.nbytes: Final = nbytes
        self.is_own: Final = is_own
        self.users = 0


class Allocations:
    """The allocations that this process has opened on one GPU, and its own that it has exported, by handle. Used in one
    thread."""

    def __init__(self, device: IpcDevice) -> None:
        self.device: Final = device
        self._known: dict[bytes, _Allocation] = {}

    def export(self, address: int) -> tuple[bytes, int]:
        """Return the handle of the allocation that an address of this process is in, and the offset of the address in
        it. To be closed like one that was opened. GpuError."""
        self.device.attach()
        base, nbytes = self.device.allocation(address)
        handle = self.device.export(address)
        self._known.setdefault(handle, _Allocation(base, nbytes, is_own=True)).users += 1
        return handle, address - base

    def open(self, handle: bytes) -> tuple[int, int]:
        """Return the address of an allocation here, and its size; to be closed as often as it was opened. GpuError."""
        found = self._known.get(handle)
        if found is None:
            self.device.attach()
            found = self._known[handle] = _Allocation(*self.device.open(handle), is_own=False)
        found.users += 1
        return found.address, found.nbytes

    def close(self, handle: bytes) -> None:
        found = self._known[handle]
        found.users -= 1
        if found.users:
            return
        del self._known[handle]
        if not found.is_own:
            try:
                self.device.attach()
                self.device.close(found.address)
            except GpuError as error:  # After a fault of the GPU everything fails until the process has ended.
                log.warning("a peer's memory on the GPU cannot be given up: %s", error)


@cache
def allocations(gpu: int) -> Allocations:
    """Return the allocations of this process on a GPU."""
    return Allocations(CudaIpc(gpu))


class CudaIpc:
    """A GPU by CUDA's driver, and torch's kernels."""

    def __init__(self, gpu: int) -> None:
        self._gpu: Final = gpu

    def attach(self) -> None:
        driver.attach(self._gpu)

    def allocation(self, address: int) -> tuple[int, int]:
        return driver.allocation_of(address)

    def export(self, address: int) -> bytes:
        return driver.export(address)[0]

    def open(self, handle: bytes) -> tuple[int, int]:
        return driver.open_exported(handle)

    def close(self, address: int) -> None:
        driver.close_exported(address)

    def view(self, address: int, nbytes: int) -> Any:
        """Return the memory as a tensor of this GPU, even where it lies on another: its kernels reach that all the
        same."""
        return tensor_at(address, nbytes, f"cuda:{self._gpu}")

    def stream(self) -> CudaStream:
        return CudaStream(self._gpu)


class CudaStream:
    """A CUDA stream for copies, which the GPU prefers to kernels that compute."""

    def __init__(self, gpu: int) -> None:
        self._torch: Any = import_module("torch")
        self._stream: Final = self._torch.cuda.Stream(gpu, priority=-1)

    def copy(self, source: Any, target: Any, rows: RowCopies) -> Callable[[], None]:
        with self._torch.cuda.stream(self._stream):
            copy_rows(source, target, rows)
            over = self._torch.cuda.Event(blocking=True)
            over.record(self._stream)
        wait: Callable[[], None] = over.synchronize
        return wait
