"""A GPU for cuda-ipc's tests without one: an allocation is a file in shared memory, which the handle names.

It keeps the rules that CUDA has, and that are easily broken where no GPU would show it: a thread must have attached; no
allocation of the process's own can be opened, nor another's twice, nor one of a process that has ended; and a copy that
is not waited for has not moved a byte, however long ago it was enqueued.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import numpy as np

from pdflow_runtime.gpu.driver import HANDLE_BYTES, GpuError
from pdflow_runtime.gpu.ipc import Allocations, CopyStream
from pdflow_runtime.gpu.pieces import RowCopies
from pdflow_runtime.transports.adopting import address_of
from pdflow_runtime.transports.base import TransportError
from pdflow_runtime.transports.region import FOLDER, OwnedRegion, map_region


class FakeGpu:
    """The fake GPU of this process."""

    def __init__(self) -> None:
        self._attached = threading.local()
        self._own: dict[int, OwnedRegion] = {}
        self.opened: dict[int, memoryview] = {}
        """By address, what is open of other processes."""
        self._addresses: dict[bytes, int] = {}

    def allocate(self, nbytes: int) -> memoryview:
        """Zeroed memory. The file of one that is not freed is swept when the process has ended."""
        region = OwnedRegion(nbytes)
        self._own[address_of(region.view)] = region
        return region.view

    def free(self, memories: Iterable[memoryview]) -> None:
        """Free the allocations that these are of, if they are any of this GPU."""
        for address in map(address_of, memories):
            for base, region in tuple(self._own.items()):
                if base <= address < base + region.nbytes:
                    self._own.pop(base).close()

    def attach(self) -> None:
        self._attached.now = True

    def check(self) -> None:
        if not getattr(self._attached, "now", False):
            raise GpuError("no context is current in this thread")

    def allocation(self, address: int) -> tuple[int, int]:
        self.check()
        for base, region in self._own.items():
            if base <= address < base + region.nbytes:
                return base, region.nbytes
        raise GpuError(f"no allocation is at {address}")

    def export(self, address: int) -> bytes:
        name = self._own[self.allocation(address)[0]].path.name
        return name.encode().ljust(HANDLE_BYTES, b"\0")

    def open(self, handle: bytes) -> tuple[int, int]:
        self.check()
        path = FOLDER / handle.rstrip(b"\0").decode("latin-1")
        if handle in self._addresses or any(region.path == path for region in self._own.values()):
            raise GpuError("the handle is one of this process, or is open already")
        try:
            os.kill(int(path.name.split("-")[1]), 0)
            view = map_region(str(path), path.stat().st_size)
        except (OSError, ValueError, IndexError, TransportError) as error:
            raise GpuError(f"the handle opens nothing: {error}") from None
        address = self._addresses[handle] = address_of(view)
        self.opened[address] = view
        return address, len(view)

    def close(self, address: int) -> None:
        self.check()
        del self.opened[address]
        self._addresses = {handle: at for handle, at in self._addresses.items() if at != address}

    def view(self, address: int, nbytes: int) -> Any:
        self.check()
        known = {**{base: region.view for base, region in self._own.items()}, **self.opened}
        base, view = next((b, v) for b, v in known.items() if b <= address and address + nbytes <= b + len(v))
        return np.frombuffer(view, np.uint8)[address - base : address - base + nbytes]

    def stream(self) -> CopyStream:
        return FakeStream(self)


class FakeStream:
    """Copies that are enqueued wait here until somebody waits for them, or for a later one."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu
        self._enqueued: list[tuple[Any, Any, RowCopies]] = []
        self._over = 0
        self._lock = threading.Lock()

    def copy(self, source: Any, target: Any, rows: RowCopies) -> Callable[[], None]:
        self._gpu.check()
        with self._lock:
            self._enqueued.append((source, target, rows))
            number = self._over + len(self._enqueued)
        return lambda: self._wait(number)

    def _wait(self, number: int) -> None:
        self._gpu.check()
        with self._lock:
            while self._over < number:
                source, target, (nbytes, at, to) = self._enqueued.pop(0)
                _as_rows(target, nbytes)[to] = _as_rows(source, nbytes)[at]
                self._over += 1


def _as_rows(memory: Any, nbytes: int) -> Any:
    return memory[: len(memory) // nbytes * nbytes].reshape(-1, nbytes)


FAKE_GPU = FakeGpu()


@cache
def fake_allocations(gpu: int) -> Allocations:
    """What this process shares on the fake GPU."""
    return Allocations(FAKE_GPU)
