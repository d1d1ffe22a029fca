"""The framing of one chunked body, checked before httptools parses it, which has no limits of its own: a chunk of
2^64 - 1 bytes is a number to it like any other, and trailers may have any length (RFC 9112 7.1)."""

from __future__ import annotations

import re
from typing import Final

from pdflow_runtime.http.messages import HttpLimits, Refusal

SIZE_DIGITS: Final = 15
"""Hexadecimal digits of a chunk's size, without leading zeros: a longer one is above 2^60."""
CHUNKS: Final = 1 << 16
"""Of one body. Each costs more than its bytes: 16 MiB in chunks of one byte would take half a minute."""
SIZE_LINE_BYTES: Final = 4096
"""A chunk's size with its extensions."""

_SIZE = re.compile(rb"0*([0-9A-Fa-f]*)")


class ChunkFraming:
    """Finds the end of the body among the bytes given to `scan`."""

    def __init__(self, limits: HttpLimits) -> None:
        self.ended = False
        self.refusal: Refusal | None = None
        self._limits = limits
        self._left = 0
        """Bytes of the open chunk that have not arrived, with its line break."""
        self._line = b""
        self._sizes = 0
        self._chunks = 0
        self._trailer_bytes = -1
        """-1 before the last chunk."""

    def scan(self, data: bytes) -> int:
        """Return how many of the bytes belong to the body. Sets `ended` at its end, and `refusal` where it is beyond
        the limits."""
        at = 0
        while at < len(data) and not self.ended and self.refusal is None:
            if self._left:
                step = min(self._left, len(data) - at)
                self._left -= step
                at += step
                continue
            newline = data.find(b"\n", at)
            stop = len(data) if newline < 0 else newline + 1
            if self._trailer_bytes >= 0:
                self._trailer_bytes += stop - at
            self._line += data[at : min(stop, at + SIZE_LINE_BYTES + 1)]
            at = stop
            self._check_line(newline >= 0)
        return at

    def _check_line(self, whole: bool) -> None:
        """Check what has arrived of the line of a chunk's size, or of a trailer."""
        line = self._line
        if whole:
            self._line = b""
        if self._trailer_bytes >= 0:
            self.ended = line == b"\r\n"
            if self._trailer_bytes > self._limits.head_bytes:
                self.refusal = Refusal(431, f"the request's trailers exceed {self._limits.head_bytes} bytes")
            elif not whole:
                self._line = line[-2:]  # enough to see that a line is not empty, the end of the body
            return
        match = _SIZE.match(line)
        assert match
        if len(match[1]) > SIZE_DIGITS:
            self.refusal = Refusal(400, f"not HTTP: the size of a chunk has more than {SIZE_DIGITS} digits")
        elif len(line) > SIZE_LINE_BYTES:
            self.refusal = Refusal(400, f"the line of a chunk's size exceeds {SIZE_LINE_BYTES} bytes")
        elif whole and match[0]:
            size = int(match[0], 16)
            self._sizes += size
            self._chunks += 1
            if self._chunks > CHUNKS:
                self.refusal = Refusal(400, f"the request's body has more than {CHUNKS} chunks")
            elif self._sizes > self._limits.body_bytes:
                self.refusal = body_too_large(self._limits)
            elif size:
                self._left = size + 2
            else:
                self._trailer_bytes = 0


def body_too_large(limits: HttpLimits) -> Refusal:
    return Refusal(413, f"the request's body exceeds {limits.body_bytes} bytes")
