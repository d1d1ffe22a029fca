"""Sends one request and reads its answer to the end, or for as long as its client would wait."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from math import inf
from typing import Final, NamedTuple

import trio

from pdflow.protocol.values import Instant, S
from pdflow.scenario.schema.workload import Client
from pdflow.workload.request import NEVER
from pdflow_runtime.bench.answer import AnswerReader, BrokenAnswerError, refusal
from pdflow_runtime.bench.ledger import Ledger
from pdflow_runtime.http.client import HttpClient
from pdflow_runtime.http.errors import UpstreamError
from pdflow_runtime.http.messages import Headers

TIMED_OUT: Final = "client timeout"
NO_FIRST_TOKEN: Final = "client timeout before the first token"
CANCELLED: Final = "client cancelled"
"""In the words of the simulation (sim/pdflow_sim/clients/client_timeouts.py)."""
ERROR_BYTES: Final = 1 << 16
"""The most that is read of an error."""


class RequestTarget(NamedTuple):
    """The server that requests go to: its address, the path of an API, headers that go with every request, and whether
    it uses TLS."""

    host: str
    port: int
    path: str
    headers: Headers = ()
    tls: bool = False

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}{self.path}"


class ClientDeadline(NamedTuple):
    """The times until which a client waits, and the reason given then; None: for ever."""

    first: tuple[Instant, str] | None
    """For the first token."""
    whole: tuple[Instant, str] | None

    @staticmethod
    def of(timeouts: Client | None, arrival: Instant, leaves_ns: int) -> ClientDeadline:
        whole: list[tuple[Instant, str]] = [(arrival + leaves_ns, CANCELLED)] if leaves_ns != NEVER else []
        if timeouts is not None and timeouts.timeout_s is not None:
            whole.append((arrival + round(timeouts.timeout_s * S), TIMED_OUT))
        first = list(whole)
        if timeouts is not None and timeouts.first_token_timeout_s is not None:
            first.append((arrival + round(timeouts.first_token_timeout_s * S), NO_FIRST_TOKEN))
        return ClientDeadline(min(first, default=None), min(whole, default=None))


class Sender:
    """Sends requests to one server. Args: `timeouts` is how long clients wait."""

    def __init__(
        self, client: HttpClient, server: RequestTarget, ledger: Ledger, timeouts: Client | None = None
    ) -> None:
        self.client: Final = client
        self.server: Final = server
        self.ledger: Final = ledger
        self.timeouts: Final = timeouts

    async def send(self, number: int, body: bytes, leaves_ns: int = NEVER) -> AnswerReader:
        """Send the request now, and return its answer; the outcome is recorded in the ledger, too."""
        ledger, answer, scope = self.ledger, AnswerReader(), trio.CancelScope()
        deadline = ClientDeadline.of(self.timeouts, ledger.records.arrival_ns[number], leaves_ns)

        def on_piece(piece: bytes) -> None:
            waited_for_first = not answer.times
            answer.feed(piece, ledger.clock.now())
            if waited_for_first and answer.times:
                scope.deadline = self._deadline(deadline.whole)

        scope.deadline = self._deadline(deadline.first)
        ledger.sent(number)
        try:
            with scope:
                await self.ask(body, on_piece)
                answer.end()
        except (UpstreamError, BrokenAnswerError) as error:
            ledger.over(number, answer, "failed", str(error))
            return answer
        until = deadline.whole if answer.times else deadline.first
        if scope.cancelled_caught and until is not None:
            ledger.over(number, answer, "cancelled", until[1])
        else:
            ledger.over(number, answer, "completed")
        return answer

    def _deadline(self, until: tuple[Instant, str] | None) -> float:
        return inf if until is None else self.ledger.clock.deadline(until[0])

    async def ask(self, body: bytes, on_piece: Callable[[bytes], None]) -> None:
        """Send a request, and call `on_piece` with each piece of the answer's body.

        BrokenAnswerError if the answer is an error, UpstreamError if it breaks off.
        """
        host, port, path, headers, _ = self.server
        async with self.client.request("POST", host, port, path, headers, body) as response:
            if response.status != 200:
                raise BrokenAnswerError(refusal(response.status, await response.read(ERROR_BYTES)))
            async with aclosing(response.pieces()) as pieces:
                async for piece in pieces:
                    on_piece(piece)
