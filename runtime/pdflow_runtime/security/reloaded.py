"""A value that is read from files, and read again when one of them changed.

The files are looked at when the value is used, at most once a second. A new content that is refused is logged once, and
the value stays: an operator who makes a mistake, or a file that is only half written, stops no client. It is read again
every second until it is accepted, as the failure may be one of the host, such as a lack of descriptors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Generic, TypeAlias, TypeVar

from pdflow.errors import PdflowError
from pdflow.protocol.values import Instant, S
from pdflow_runtime.clock import now_ns

log = logging.getLogger(__name__)

T = TypeVar("T")
EVERY_NS: Final = 1 * S
Stamp: TypeAlias = tuple[int, ...]
"""What changes with a file: its inode, its size, and when it was written and its mode set. () if it is not there."""


class Reloaded(Generic[T]):
    """Args: `what` the value is, for the log; `files`, which it is read from; `read` reads it, and raises PdflowError
    if it cannot be used, as this constructor does."""

    def __init__(
        self, what: str, files: Sequence[Path], read: Callable[[], T], clock: Callable[[], Instant] = now_ns
    ) -> None:
        self._what: Final = what
        self._files: Final = files
        self._read: Final = read
        self._clock: Final = clock
        self._stamps = self._stamps_now()
        """Those of the files that the value was read from."""
        self._logged: list[Stamp] = []
        """Those of the files whose refusal was logged."""
        self._value = read()
        self._due_ns = 0

    def current(self) -> T:
        """Return the value, read again if a file changed."""
        now = self._clock()
        if now >= self._due_ns:
            self._due_ns = now + EVERY_NS
            stamps = self._stamps_now()
            if stamps != self._stamps:
                self._read_again(stamps)
        return self._value

    def _read_again(self, stamps: list[Stamp]) -> None:
        """Read the value from the files, which have these stamps."""
        try:
            self._value = self._read()
        except PdflowError as error:
            if stamps != self._logged:
                self._logged = stamps
                log.error("%s: the changed file is refused, the previous content stays in use: %s", self._what, error)
        else:
            self._stamps = stamps
            log.info("%s: read again, as the file changed", self._what)

    def _stamps_now(self) -> list[Stamp]:
        return [_stamp(path) for path in self._files]


def _stamp(path: Path) -> Stamp:
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
