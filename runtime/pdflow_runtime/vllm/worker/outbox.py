"""What a rank reports to its scheduler's endpoint until a step takes it: filled in trio's thread, emptied in vLLM's."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, Final

from pdflow.protocol.events import PeerResponded, PrefillMissing
from pdflow.protocol.values import Address


class Outbox:
    """Events for the scheduler's endpoint, in their order."""

    def __init__(self) -> None:
        self._lock: Final = threading.Lock()
        self._filled: Final = threading.Condition(self._lock)
        self._events: deque[tuple[Address, Any]] = deque()
        self._responded: Final[set[Address]] = set()
        """Peers whose response is among the events: one says as much as many."""

    def __len__(self) -> int:
        return len(self._events)

    def put(self, to: Address, event: Any) -> None:
        with self._lock:
            if type(event) is PeerResponded:
                if event.peer in self._responded:
                    return
                self._responded.add(event.peer)
            self._events.append((to, event))
            self._filled.notify()

    def wait(self, most_s: float) -> None:
        """Wait until there is an event, but not longer than `most_s`."""
        with self._filled:
            if not self._events:
                self._filled.wait(most_s)

    def take(self) -> list[tuple[Address, Any]]:
        with self._lock:
            events = list(self._events)
            self._events.clear()
            self._responded.clear()
        return events

    def take_missing(self) -> list[PrefillMissing]:
        """Take out what asks for prompts that the rank does not know."""
        with self._lock:
            found = [event for _, event in self._events if type(event) is PrefillMissing]
            if found:
                self._events = deque(each for each in self._events if type(each[1]) is not PrefillMissing)
        return found
