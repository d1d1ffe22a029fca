"""The tokens of an answer that have been passed on to its client, read back from the events that brought them.

Engines put the ids of an event's tokens into it (`Between.returns_token_ids`), in vLLM's field `token_ids`. Pieces come
in batches (`answer_pieces.py`), and are reduced to their token ids when 2 KiB are there, since thousands of streams may
be open. An event that is longer is kept until it is whole.
"""

from __future__ import annotations

import re
from array import array
from typing import Final

from pdflow_runtime.http.openai.answers import DONE
from pdflow_runtime.http.openai.between import GivenTokens

REDUCE_BYTES: Final = 2 << 10
"""Bytes of pieces that are kept before they are reduced to token ids."""
MOST_BYTES: Final = 4 << 20
"""The longest event that is kept while it is incomplete."""
EVENT_END: Final = b"\n\n"
FINISHED: Final = b'"finish_reason":"'
USAGE: Final = b'"choices":[]'

# No text of an answer holds these, or FINISHED: quotes are escaped there. `"prompt_token_ids"` has no quote before
# `token_ids`.
_token_ids: Final = re.compile(rb'"token_ids":\[([0-9,]*)\]')
_name: Final = re.compile(rb'"id":"([^"]*)".*?"created":([0-9]+)', re.DOTALL)
_framing: Final = re.compile(rb"\r\n[0-9a-fA-F]+\r\n")
"""What lies between the data of two chunks. No event holds it: line breaks in a text are escaped."""
BETWEEN_CHUNKS: Final = (b"", b"\r\n")


class PassedAnswer:
    """What a client has received of an answer in a stream of events."""

    def __init__(self) -> None:
        self.finished = False
        """True if the event with the answer's last token has been passed on."""
        self.has_usage = False
        """True if the event with the usage has been."""
        self.is_done = False
        """True if the end of the stream has been."""
        self._tokens: Final = array("i")
        self._name: tuple[str, int] | None = None
        self._pieces: list[bytes] = []
        self._bytes = 0
        self._reduce_at = REDUCE_BYTES
        self._is_lost = False
        """True if an event was too long to be kept."""

    def add(self, data: bytes) -> None:
        """Add a piece, in which an event may begin or end anywhere. It may hold the framing of chunks."""
        self._pieces.append(data)
        self._bytes += len(data)
        if self._bytes > self._reduce_at:
            self._reduce()

    def begin(self, token: int, answer_id: str, created: int) -> None:
        """Add the first token, which came from P, and the name of the answer."""
        self._tokens.append(token)
        self._name = answer_id, created

    @property
    def tokens(self) -> list[int]:
        self._reduce()
        return self._tokens.tolist()

    @property
    def count(self) -> int:
        """How many tokens have been passed on whose ids are known."""
        self._reduce()
        return len(self._tokens)

    def given(self) -> GivenTokens | None:
        """Return what the next engine must know of the answer; None if the client has no token of it, or has an event
        that is incomplete."""
        self._reduce()
        if self._is_lost or b"".join(self._pieces) not in BETWEEN_CHUNKS:
            return None
        return GivenTokens(len(self._tokens), *self._name) if self._tokens and self._name else None

    def _reduce(self) -> None:
        text = _framing.sub(b"", b"".join(self._pieces))
        end = text.rfind(EVENT_END) + len(EVENT_END)
        if end < len(EVENT_END):
            end = 0
        whole, rest = text[:end], text[end:]
        if len(rest) > MOST_BYTES:
            self._is_lost, rest = True, b""
        self._pieces, self._bytes = [rest], len(rest)
        # Twice as long as what is kept: a long event that comes in many pieces is copied a few times, not for each.
        self._reduce_at = max(REDUCE_BYTES, 2 * len(rest))
        if self._name is None and (found := _name.search(whole)):
            self._name = found[1].decode(), int(found[2])
        if ids := b",".join(filter(None, _token_ids.findall(whole))):
            self._tokens.extend(map(int, ids.split(b",")))
        self.finished = self.finished or FINISHED in whole
        self.has_usage = self.has_usage or USAGE in whole
        self.is_done = self.is_done or DONE in whole
