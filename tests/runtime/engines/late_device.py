"""A device on which nothing has happened until it has been waited for.

The engine computes in memory of its own. What others see of it, a transport or a peer, is other memory: the state of
the first when an event was recorded is brought there when that event has been waited for, and not before. Work of the
streams (computation, copies, and loads, which another thread may queue) becomes visible apart: an event of one says
nothing of the others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


class LateEvent:
    """Args: brings the state at its recording to where others see it; how often it is asked in vain."""

    def __init__(self, publish: Callable[[], None], asked_in_vain: int) -> None:
        self._publish = publish
        self._asked_in_vain = asked_in_vain

    def query(self) -> bool:
        self._asked_in_vain -= 1
        if self._asked_in_vain >= 0:
            return False
        self._publish()
        return True

    def synchronize(self) -> None:
        self._publish()


class LateDevice:
    """Args: `asked_in_vain`, how often an event is not over when it is asked."""

    where = torch.device("cpu")

    def __init__(self, asked_in_vain: int) -> None:
        self._asked_in_vain = asked_in_vain
        self._memories: dict[str, list[tuple[Any, Any]]] = {"computation": [], "copies": [], "loads": []}
        self._current = threading.local()

    def hide(self, stream: str, seen: Sequence[Any]) -> list[Any]:
        """Memory in which the work of a stream goes on hidden from those who look at `seen`."""
        hidden = [memory.clone() for memory in seen]
        self._memories[stream] += zip(hidden, seen, strict=True)
        return hidden

    @contextmanager
    def computing(self) -> Iterator[None]:
        self._current.stream = "computation"
        yield

    @contextmanager
    def copying(self) -> Iterator[None]:
        self._current.stream = "copies"
        yield
        self._current.stream = "computation"

    @contextmanager
    def loading(self) -> Iterator[None]:
        self._current.stream = "loads"
        yield
        del self._current.stream

    def record(self) -> LateEvent:
        state = [(seen, hidden.clone()) for hidden, seen in self._memories[self._current.stream]]

        def publish() -> None:
            for seen, then in state:
                seen.copy_(then)

        return LateEvent(publish, self._asked_in_vain)

    def tensor(self, values: Any, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)
