"""What a rank measures of its transfers, and what it has measured since somebody last asked.

A transfer is measured when it ends, as in vLLM's NIXL connector; one that has failed is only counted. `metrics.py` has
the metrics of a process that serves them itself. Here they are kept until another thread takes them, for an engine
whose own metrics they become.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Final, NamedTuple, Protocol

from pdflow.protocol.values import Instant
from pdflow_runtime.clock import now_ns

MOST_SAMPLES: Final = 10_000
"""The most transfers that are kept: an engine that does not step for long takes the latest ones."""


class MeasuresTransfers(Protocol):
    """Measures a rank's transfers."""

    def moved(self, begun_ns: Instant, posted_ns: Instant, nbytes: int, descriptors: int) -> None:
        """Note that a transfer has ended well, now. `posted_ns`: when all of it was with the transport."""

    def failed(self) -> None: ...
    def unread(self) -> None:
        """Note that a notification could not be read."""

    def expired(self) -> None:
        """Note that a prompt's lease has ended before its KV was fetched or sent."""


class Transferred(NamedTuple):
    """One transfer that has ended well."""

    took_ns: int
    """From its beginning to its end."""
    post_ns: int
    """From its beginning until all of it was with the transport."""
    nbytes: int
    descriptors: int


class Samples(NamedTuple):
    """What was measured since the last call."""

    transferred: tuple[Transferred, ...] = ()
    failed: int = 0
    unread: int = 0
    expired: int = 0
    unreached: int = 0
    """Handshakes that failed."""


NOTHING: Final = Samples()


class TransferSamples:
    """A measurer of transfers for one thread, and of what it has measured for another."""

    def __init__(self) -> None:
        self._lock: Final = threading.Lock()
        self._transferred: deque[Transferred] = deque(maxlen=MOST_SAMPLES)
        self._counts = NOTHING

    def moved(self, begun_ns: Instant, posted_ns: Instant, nbytes: int, descriptors: int) -> None:
        with self._lock:
            sample = Transferred(now_ns() - begun_ns, posted_ns - begun_ns, nbytes, descriptors)
            self._transferred.append(sample)

    def failed(self) -> None:
        with self._lock:
            self._counts = self._counts._replace(failed=self._counts.failed + 1)

    def unread(self) -> None:
        with self._lock:
            self._counts = self._counts._replace(unread=self._counts.unread + 1)

    def expired(self) -> None:
        with self._lock:
            self._counts = self._counts._replace(expired=self._counts.expired + 1)

    def unreached(self) -> None:
        """Note that a handshake has failed."""
        with self._lock:
            self._counts = self._counts._replace(unreached=self._counts.unreached + 1)

    def take(self) -> Samples:
        """Return what was measured since the last call."""
        with self._lock:
            samples = self._counts._replace(transferred=tuple(self._transferred))
            self._transferred.clear()
            self._counts = NOTHING
        return samples
