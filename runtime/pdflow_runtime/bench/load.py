"""Sends requests when they are due: at instants of their own, or each when another has ended.

The order and the instants are those of the simulated world (sim/pdflow_sim/world.py,
sim/pdflow_sim/clients/sessions.py). What can be prepared before it is due is: preparing a long prompt takes longer than
sending it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import count
from typing import Final, Protocol

import trio

from pdflow.workload.request import WHEN_ONE_ENDS, Request
from pdflow_runtime.bench.answer import AnswerReader
from pdflow_runtime.bench.contents import Contents
from pdflow_runtime.bench.form import RequestForm
from pdflow_runtime.bench.sender import Sender

PREPARED_BYTES: Final = 64 << 20
"""Most bytes of bodies that wait to be sent; one is always prepared."""

AT_ONCE: Final = 100
"""Of requests that are due already, as many are sent before other tasks have a turn."""


class Load(Protocol):
    """The requests of a run, as `bench` sends them."""

    def prepare(self) -> None:
        """Prepare what can be prepared before the clock runs."""

    async def run(self) -> None:
        """Send every request and wait for its answer, once the clock runs."""


class ConcurrencyLimit:
    """The limit of --max-concurrency: a request is sent when it has a slot; None: without limit."""

    def __init__(self, sender: Sender, most: int | None) -> None:
        self.sender: Final = sender
        self.ledger: Final = sender.ledger
        self._free: Final = None if most is None else trio.Semaphore(most)

    async def send(self, number: int, body: bytes, leaves_ns: int) -> AnswerReader:
        """Send the request as soon as it has a slot."""
        if self._free is None:
            return await self.sender.send(number, body, leaves_ns)
        await self._free.acquire()
        self.ledger.placed(number)
        try:
            return await self.sender.send(number, body, leaves_ns)
        finally:
            self._free.release()


class Requests:
    """Requests that do not depend on each other. `texts` has the text of each prompt, None where it is to be made
    up."""

    def __init__(
        self,
        limit: ConcurrencyLimit,
        drawn: Iterator[Request],
        texts: Iterator[str | None],
        contents: Contents,
        form: RequestForm,
    ) -> None:
        self.limit: Final = limit
        self.ledger: Final = limit.ledger
        self._drawn: Final = zip(count(), drawn, texts, strict=False)
        self._contents: Final = contents
        self._form: Final = form
        self._ready: Final[deque[tuple[Request, bytes]]] = deque()
        self._ready_bytes = 0
        self._ends: Final = trio.Semaphore(0)
        """One for each request that has ended; what is due when one ends takes it."""

    def prepare(self) -> None:
        while self._ready_bytes < PREPARED_BYTES and self._prepare_one():
            pass

    def _prepare_one(self) -> bool:
        for number, request, text in self._drawn:
            prompt = self._contents.prompt(number, request) if text is None else text
            body = self._form.body(prompt, request.output_tokens)
            self._ready.append((request, body))
            self._ready_bytes += len(body)
            return True
        return False

    async def run(self) -> None:
        clock = self.ledger.clock
        async with trio.open_nursery() as nursery:
            while self._ready or self._prepare_one():
                request, body = self._ready.popleft()
                self._ready_bytes -= len(body)
                if request.arrival_ns == WHEN_ONE_ENDS:
                    await self._ends.acquire()
                    due = clock.now()
                else:
                    due = request.arrival_ns
                    if due > clock.now() or len(self.ledger.records) % AT_ONCE == 0:
                        await clock.sleep_until(due)
                nursery.start_soon(self._send, self.ledger.due(due, request), body, request.leaves_ns)

    async def _send(self, number: int, body: bytes, leaves_ns: int) -> None:
        await self.limit.send(number, body, leaves_ns)
        self._ends.release()
