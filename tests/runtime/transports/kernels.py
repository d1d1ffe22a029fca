"""A device that is the CPU: NCCL's staging with torch's kernels over memory of this process, for the stand-in."""

from __future__ import annotations

import contextlib
import ctypes
from importlib import import_module
from typing import Any

from pdflow_runtime.transports.nccl.staging import CHUNK_BYTES, RowStaging
from pdflow_runtime.transports.nccl.standin import StandInStream


class CpuStaging(RowStaging):
    def __init__(self) -> None:
        torch: Any = import_module("torch")
        self.buffer = torch.zeros(CHUNK_BYTES, dtype=torch.uint8)
        self._queue = StandInStream()

    @property
    def stream(self) -> StandInStream:
        return self._queue

    def attach(self) -> None:
        pass

    def mark(self) -> None:
        pass

    def left(self) -> int:
        return self._queue.left()

    def on_stream(self) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    def finish(self) -> None:
        pass


class CpuDevice:
    def __init__(self, gpu: int) -> None:
        self.gpu = gpu

    def over_vram(self, address: int, nbytes: int) -> Any:
        raw: Any = (ctypes.c_ubyte * nbytes).from_address(address)
        return self.over_host(memoryview(raw).cast("B"))

    def over_host(self, memory: memoryview) -> Any:
        torch: Any = import_module("torch")
        return torch.frombuffer(memory, dtype=torch.uint8)

    def staging(self) -> CpuStaging:
        return CpuStaging()
