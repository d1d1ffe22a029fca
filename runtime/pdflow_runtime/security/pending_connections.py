"""Pending connections: streams whose peer has not authenticated itself yet, limited in number.

When one more comes, the oldest is evicted: a peer authenticates itself at once, so connections that stay silent keep no
peer out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Generic, TypeVar

T = TypeVar("T")


class PendingConnections(Generic[T]):
    """The pending connections of a listener. Args: `most`, the limit; `evict`, which ends the oldest when a further one
    comes."""

    def __init__(self, most: int, evict: Callable[[T], None]) -> None:
        self.most: Final = most
        self._evict: Final = evict
        self._slots: Final[dict[T, None]] = {}
        """The pending connections, oldest first."""

    def add(self, connection: T) -> None:
        if len(self._slots) >= self.most:
            oldest = next(iter(self._slots))
            del self._slots[oldest]
            self._evict(oldest)
        self._slots[connection] = None

    def leave(self, connection: T) -> None:
        """Remove a connection, as its peer has authenticated itself or it is over; no effect if it has been evicted."""
        self._slots.pop(connection, None)
