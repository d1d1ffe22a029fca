"""Clients that do not wait for ever: they hang up when a timeout is over, or when they feel like it.

What arrives at the instant at which a client gives up has arrived. A timer of a request that has ended finds nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pdflow.engine.sequence import Sequence
from pdflow.protocol.values import Instant
from pdflow.workload.request import NEVER, Request
from sim.clock import AFTER_ENGINES

if TYPE_CHECKING:
    from pdflow.routing.attempt import Attempt
    from sim.world import World

TIMED_OUT: Final = "client timeout"
NO_FIRST_TOKEN: Final = "client timeout before the first token"
CANCELLED: Final = "client cancelled"


class Patience:
    """Args: from a request's arrival to when its client gives up, None if it does not: on the whole answer, and on its
    first token."""

    def __init__(self, world: World, timeout_ns: Instant | None, first_token_ns: Instant | None) -> None:
        self.world = world
        self.timeout_ns = timeout_ns
        self.first_token_ns = first_token_ns

    def arrived(self, request: int, says: Request) -> None:
        call = self.world.env.call
        if says.leaves_ns != NEVER:
            call(says.leaves_ns, self.cancels, request, AFTER_ENGINES)
        if self.first_token_ns is not None:
            call(self.first_token_ns, self.misses_first_token, request, AFTER_ENGINES)
        if self.timeout_ns is not None:
            call(self.timeout_ns, self.times_out, request, AFTER_ENGINES)

    def cancels(self, request: int) -> None:
        self.world.router.hang_up(request, CANCELLED)

    def times_out(self, request: int) -> None:
        self.world.router.hang_up(request, TIMED_OUT)

    def misses_first_token(self, request: int) -> None:
        if not self.has_first_token(request):
            self.world.router.hang_up(request, NO_FIRST_TOKEN)

    def has_first_token(self, request: int) -> bool:
        """Whether a request that has not ended has got one, from an attempt that is under way."""
        world = self.world
        return world.records.first_token_ns[request] >= 0 or any(
            first_token_came(world, attempt) for attempt in world.router.attempts_of(request)
        )


def first_token_came(world: World, attempt: Attempt) -> bool:
    """Whether the client has a token of this attempt."""
    return 0 <= first_token_ns(world, attempt) <= world.env.now - world.router.http_ns


def first_token_ns(world: World, attempt: Attempt) -> Instant:
    """When the engine that decodes it generates its first token; -1 if that is not known yet."""
    seq = decoding(world, attempt)
    return -1 if seq is None else seq.first_token_ns


def decoding(world: World, attempt: Attempt) -> Sequence | None:
    """Its sequence at the engine that generates its tokens."""
    if attempt.request_id in world.decoded:
        return world.decoded[attempt.request_id][0]
    if attempt.d_open:
        return world.decodes[attempt.d].legs.get(attempt.request_id)
    leg = world.prefills[attempt.p].by_request.get(attempt.request_id)
    return None if leg is None or leg.seq.prefill_only else leg.seq
