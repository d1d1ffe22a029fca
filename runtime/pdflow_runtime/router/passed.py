"""The tokens of an answer that have been passed on to its client, read back from the events that brought them.

Engines put the ids of an event's tokens into it (`Between.returns_token_ids`), in vLLM's field `token_ids`. Nothing is
parsed while pieces pass: they are kept, and every 8 KiB of them are reduced to their token ids, since thousands of
streams may be open.
"""

from __future__ import annotations

import re
from array import array
from typing import Final

from pdflow_runtime.http.openai.between import GivenTokens

REDUCE_BYTES: Final = 8 << 10
"""Bytes of pieces that are kept before they are reduced to token ids."""
EVENT_END: Final = b"\n\n"
FINISHED: Final = b'"finish_reason":"'

# No text of an answer holds these, or FINISHED: quotes are escaped there. `"prompt_token_ids"` has no quote before
# `token_ids`.
_token_ids: Final = re.compile(rb'"token_ids":\[([0-9,]*)\]')
_name: Final = re.compile(rb'"id":"([^"]*)".*?"created":([0-9]+)', re.DOTALL)


class PassedAnswer:
    """What a client has received of an answer in a stream of events."""

    def __init__(self) -> None:
        self.finished = False
        """True if the event with the answer's last token has been passed on."""
        self._tokens: Final = array("i")
        self._name: tuple[str, int] | None = None
        self._pieces: list[bytes] = []
        self._bytes = 0

    def add(self, data: bytes) -> None:
        """Add a piece, in which an event may begin or end anywhere. It may hold the framing of chunks."""
        self._pieces.append(data)
        self._bytes += len(data)
        if self._bytes > REDUCE_BYTES:
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
        """Return what the next engine must know of the answer; None if the client has no token of it."""
        self._reduce()
        return GivenTokens(len(self._tokens), *self._name) if self._tokens and self._name else None

    def _reduce(self) -> None:
        text = b"".join(self._pieces)
        end = text.rfind(EVENT_END) + len(EVENT_END)
        if end < len(EVENT_END):
            self._pieces = [text]
            return
        whole, rest = text[:end], text[end:]
        self._pieces, self._bytes = [rest], len(rest)
        if self._name is None and (found := _name.search(whole)):
            self._name = found[1].decode(), int(found[2])
        if ids := b",".join(filter(None, _token_ids.findall(whole))):
            self._tokens.extend(map(int, ids.split(b",")))
        self.finished = self.finished or FINISHED in whole
