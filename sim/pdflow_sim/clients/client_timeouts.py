"""Clients that do not wait for ever: they hang up when a timeout is over, or when the workload says so.

What arrives at the instant at which a client gives up has arrived. A timer of a request that has ended finds nothing.
"""

from __future__ import annotations

from typing import Final

from pdflow.protocol.values import Instant
from pdflow.workload.request import NEVER, Request
from pdflow_sim.clients.clients import Clients
from pdflow_sim.clock import AFTER_ENGINES

TIMED_OUT: Final = "client timeout"
NO_FIRST_TOKEN: Final = "client timeout before the first token"
CANCELLED: Final = "client cancelled"


class ClientTimeouts:
    """Cancels the requests of clients that give up. Args: from a request's arrival to when its client gives up, None if
    it does not: on the whole answer, and on its first token.
    """

    def __init__(self, clients: Clients, timeout_ns: Instant | None, first_token_ns: Instant | None) -> None:
        self.clock = clients.clock
        self.records = clients.metrics.records
        self.router = clients.router
        self.timeout_ns = timeout_ns
        self.first_token_ns = first_token_ns

    def arrived(self, request: int, spec: Request) -> None:
        call = self.clock.call
        if spec.leaves_ns != NEVER:
            call(spec.leaves_ns, self.cancels, request, AFTER_ENGINES)
        if self.first_token_ns is not None:
            call(self.first_token_ns, self.misses_first_token, request, AFTER_ENGINES)
        if self.timeout_ns is not None:
            call(self.timeout_ns, self.times_out, request, AFTER_ENGINES)

    def cancels(self, request: int) -> None:
        self.router.hang_up(request, CANCELLED)

    def times_out(self, request: int) -> None:
        self.router.hang_up(request, TIMED_OUT)

    def misses_first_token(self, request: int) -> None:
        if not self.has_first_token(request):
            self.router.hang_up(request, NO_FIRST_TOKEN)

    def has_first_token(self, request: int) -> bool:
        """True if a request that has not ended has its first token, from an attempt that is under way."""
        if self.records.first_token_ns[request] >= 0:
            return True
        delivered = self.router.first_tokens.delivered
        return any(delivered(attempt) for attempt in self.router.attempts_of(request))
