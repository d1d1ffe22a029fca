"""Where an engine computes: a CPU, where a step's arithmetic has ended when its call returns, or a GPU, where it has
only been queued then.

Work on a GPU is queued on streams: those of one stream run in order, and those of two in any order. So a layer's KV is
in its blocks only when an event that was recorded behind it has been waited for, and a copy that reads the blocks must
be queued behind the computation. What is not synchronised so may be seen in any order; `tests/runtime/engines/
late_device.py` is a device that does just that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from pdflow_runtime.gpu import driver


class DeviceEvent(Protocol):
    """A point in the work of a device."""

    def query(self) -> bool:
        """True if all work before it has ended."""

    def synchronize(self) -> None:
        """Wait until all work before it has ended."""


class Device(Protocol):
    """A device that computes for one engine. Its methods are called in the thread that computes the step, and in that
    of its copies."""

    @property
    def where(self) -> torch.device:
        """The device by torch's name."""

    def computing(self) -> AbstractContextManager[None]:
        """Queue what is called in this context as computation."""

    def copying(self) -> AbstractContextManager[None]:
        """Queue what is called in this context as a copy. It begins when all computation queued so far has ended,
        and runs at the same time as later computation."""

    def loading(self) -> AbstractContextManager[None]:
        """Queue what is called in this context as a copy that waits for no computation: what is queued by now does not
        use what it copies to. May be entered in any thread."""

    def record(self) -> DeviceEvent:
        """Return an event behind what the current context has queued so far."""

    def tensor(self, values: Any, dtype: torch.dtype = torch.int64) -> Tensor:
        """Return these numbers as a tensor there."""


class _Over:
    """An event of a device on which nothing is queued."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class Cpu:
    where: Final = torch.device("cpu")
    _over: Final = _Over()

    def computing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def copying(self) -> AbstractContextManager[None]:
        return nullcontext()

    def loading(self) -> AbstractContextManager[None]:
        return nullcontext()

    def record(self) -> DeviceEvent:
        return self._over

    def tensor(self, values: Any, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype)


class Cuda:
    """A GPU, with one stream for computation and one for copies. Args: `gpu`, its number in this process."""

    def __init__(self, gpu: int = 0) -> None:
        driver.attach(gpu)
        self.where: Final = torch.device("cuda", gpu)
        self._compute: Final = torch.cuda.Stream(self.where)  # type: ignore[no-untyped-call]
        self._copy: Final = torch.cuda.Stream(self.where)  # type: ignore[no-untyped-call]

    @contextmanager
    def computing(self) -> Iterator[None]:
        driver.attach(self.where.index)
        with torch.cuda.stream(self._compute):
            yield

    @contextmanager
    def copying(self) -> Iterator[None]:
        driver.attach(self.where.index)
        self._copy.wait_stream(self._compute)
        with torch.cuda.stream(self._copy):
            yield

    @contextmanager
    def loading(self) -> Iterator[None]:
        driver.attach(self.where.index)
        with torch.cuda.stream(self._copy):
            yield

    def record(self) -> DeviceEvent:
        # The thread that waits for it sleeps instead of polling, and gives up Python's lock.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def tensor(self, values: Any, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.where)


def device_named(name: str) -> Device:
    """Return the device of this torch name: `cpu`, or `cuda` for this process's first GPU."""
    return Cpu() if name == "cpu" else Cuda(torch.device(name).index or 0)
