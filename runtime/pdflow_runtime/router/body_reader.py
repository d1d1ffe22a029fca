"""Reads the bodies of requests, so that long ones do not stop the event loop one after the other.

A long body takes up to a tenth of a second, in which nothing else runs. So no more than one is read in a turn of the
event loop, in the order of arrival, however many clients send one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import trio

from pdflow_runtime.router.prompts import Prompts
from pdflow_runtime.router.tokenizer_pool import LONG_BYTES

Read = TypeVar("Read")


class BodyReader:
    """Args: `prompts` says how much a body may have."""

    def __init__(self, prompts: Prompts) -> None:
        self.prompts: Final = prompts
        self._long: Final = trio.Lock()

    async def read(self, body: bytes, reader: Callable[[bytes], Read]) -> Read:
        """Return what `reader` makes of a body. OpenAIError, before it is called, for one with too many values."""
        if len(body) <= LONG_BYTES:
            return self._read(body, reader)
        async with self._long:
            await trio.lowlevel.checkpoint()
            return self._read(body, reader)

    def _read(self, body: bytes, reader: Callable[[bytes], Read]) -> Read:
        self.prompts.check_body(body)
        return reader(body)
