"""Lines of a log, written by a thread: a slow or full disk, or a reader that stands still, does not stop the process.

What cannot be written is dropped and counted. Lines may come from any thread.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Final, Self

log = logging.getLogger(__name__)

FLUSH_S: Final = 0.2
"""How long a line waits for others."""
WAITING_BYTES: Final = 4 << 20
"""Of lines that are not written yet: further ones are dropped."""
LAST_S: Final = 1.0
"""Time for the last lines, when the process ends."""
PIPE_BYTES: Final = 4096
"""What a pipe takes in one piece (PIPE_BUF): lines of several processes are not mixed up in it."""


class LineWriter:
    """Writes lines while its context is open, and at the end those that are left. Args: `descriptor`: where they are
    written; `dropped` is called, from any thread, with the number of lines that could not be written."""

    def __init__(self, descriptor: int, dropped: Callable[[int], None]) -> None:
        self.descriptor: Final = descriptor
        self.dropped: Final = dropped
        self._lock: Final = threading.Lock()
        """Guards the two that follow."""
        self._lines: list[bytes] = []
        self._waiting_bytes = 0
        self._news: Final = threading.Event()
        self._closing: Final = threading.Event()
        self._thread: Final = threading.Thread(target=self._run, name="log", daemon=True)
        self._torn = False
        """Whether the last line was written in part."""
        self._failed = False

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._news.set()
        self._thread.join(LAST_S)

    def add(self, line: bytes) -> None:
        """Write the line, which ends with a line break, soon."""
        with self._lock:
            fits = self._waiting_bytes + len(line) <= WAITING_BYTES
            if fits:
                self._lines.append(line)
                self._waiting_bytes += len(line)
        if fits:
            self._news.set()
        else:
            self.dropped(1)

    def _run(self) -> None:
        while not self._closing.is_set():
            self._news.wait()
            self._closing.wait(FLUSH_S)
            self._news.clear()
            self._flush()
        self._flush()

    def _flush(self) -> None:
        with self._lock:
            lines, self._lines = self._lines, []
        lost, reason = self._write(lines)
        with self._lock:
            self._waiting_bytes -= sum(map(len, lines))
        if lost:
            self.dropped(lost)
            if not self._failed:
                self._failed = True
                log.warning("the log cannot be written, and lines are dropped: %s", reason)
        elif lines:
            self._failed = False

    def _write(self, lines: list[bytes]) -> tuple[int, str]:
        """Write the lines. Returns how many are lost, and why."""
        for number, piece in pieces_of(lines):
            data = b"\n" + piece if self._torn else piece
            try:
                while data:
                    written = os.write(self.descriptor, data)
                    self._torn = written < len(data)
                    data = data[written:]
            except OSError as error:
                return len(lines) - number, error.strerror or str(error)
        return 0, ""


def pieces_of(lines: list[bytes]) -> list[tuple[int, bytes]]:
    """Join lines to pieces that a pipe takes at once; with the number of the first line of each."""
    pieces: list[tuple[int, bytes]] = []
    for number, line in enumerate(lines):
        if pieces and len(pieces[-1][1]) + len(line) <= PIPE_BYTES:
            pieces[-1] = pieces[-1][0], pieces[-1][1] + line
        else:
            pieces.append((number, line))
    return pieces
