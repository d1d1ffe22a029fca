"""The supervisor's pipe to the router, and the state that a restarted router gets through it.

The router keeps which engines are up, which ended for good, and which an operator drained. A router that starts again
gets all of it from here before it accepts a connection: first the orders, so that a drained engine gets no request in
between, then the engines, then `AllReported`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Final

import msgspec
import trio

from pdflow_runtime.process.addresses import (
    AllReported,
    DrainOrder,
    EngineAddress,
    EngineGone,
    EngineLeaving,
    News,
)

log = logging.getLogger(__name__)


class RouterPipe:
    """Reports engines to whichever router runs."""

    def __init__(self) -> None:
        self.up: Final[dict[str, EngineAddress]] = {}
        """Engines that are up, by name."""
        self.ended: Final[set[str]] = set()
        """Engines that were ordered to end, and are started again by an order only."""
        self.drained: Final[dict[str, DrainOrder]] = {}
        """The latest order of an operator about each engine."""
        self._stdin: trio.abc.SendStream | None = None
        self._send_lock: Final = trio.Lock()
        """Two engines may end at once, and only one may write."""

    async def connect(self, stdin: trio.abc.SendStream) -> None:
        """Report to this router from now on, first everything that an earlier one knew."""
        async with self._send_lock:
            self._stdin = stdin
            # What is reported meanwhile waits for the lock, and follows.
            for news in tuple(self._known()):
                await self._send(news)

    async def disconnect(self) -> None:
        """Close the pipe to a router that has ended."""
        async with self._send_lock:
            if self._stdin is not None:
                await trio.aclose_forcefully(self._stdin)
            self._stdin = None

    async def report(self, news: News) -> None:
        """Report a change. While no router runs it is kept for the next one."""
        match news:
            case EngineAddress():
                self.up[news.engine] = news
                self.ended.discard(news.engine)
            case EngineGone():
                self.up.pop(news.engine, None)
                if news.for_good:
                    self.ended.add(news.engine)
                    self.drained.pop(news.engine, None)
        async with self._send_lock:
            await self._send(news)

    def ordered(self, order: DrainOrder) -> None:
        """Keep an operator's order, which the router has followed already."""
        self.drained[order.engine] = order

    def _known(self) -> Iterator[News]:
        yield from self.drained.values()
        yield from self.up.values()
        for name in self.ended:
            yield EngineGone(name, for_good=True)
        yield AllReported()

    async def _send(self, news: News) -> None:
        if self._stdin is None:
            return
        try:
            await self._stdin.send_all(msgspec.json.encode(news) + b"\n")
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self._stdin = None
            what = news.engine if isinstance(news, EngineAddress | EngineGone | EngineLeaving) else "the engines"
            log.warning("could not report %s to the router, which has ended; the next router gets the report", what)
