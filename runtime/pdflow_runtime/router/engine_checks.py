"""Checks of which engines have sent anything of an answer, for the rule of stalled engines (`pdflow.routing.watching`).

The engine of an answer's pieces is noted when they are looked at (`AnswerPieces.look`). At the interval of the rule the
router's endpoint gets what was noted, and of which answers nothing has come. An engine whose answer waits for its
client counts as active: nothing is received from it meanwhile.

An engine is asked with `GET /health`; any answer is a response. So is an error that comes from its host, as that nobody
listens at its port any more, which is so while an engine drains: only a process that is stopped gives none. Whether a
process has died is seen by its connections. The answer says how many steps the engine has run: if it has run none since
its answer before, it had nothing to compute, or its GPU hangs.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import trio

from pdflow.protocol.values import EngineId, RequestId, S
from pdflow.routing.effects import AskEngine, EngineWatched
from pdflow.routing.events import EnginesChecked
from pdflow.routing.governed import GovernedRouter
from pdflow.routing.watching import WatchingRouter
from pdflow_runtime.http.client import HttpClient
from pdflow_runtime.http.errors import UpstreamError
from pdflow_runtime.http.messages import STEPS, first
from pdflow_runtime.process.addresses import EngineAddress
from pdflow_runtime.router.call import Call
from pdflow_runtime.security.tls import log_tls_failure

log = logging.getLogger(__name__)

LIMITS_ASKED: Final = 4
"""A question is given up after so many of the shortest limits."""
UNREACHABLE: Final = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT)
"""Errors of a connection that nobody has answered."""


class EngineChecks:
    """The checks of one router. Args: `put` hands an event to its endpoint; `calls` are those under way; `client` asks
    the engines at `addresses`."""

    def __init__(
        self,
        router: GovernedRouter,
        put: Callable[[EnginesChecked], None],
        calls: Mapping[int, Call],
        client: HttpClient,
        addresses: Mapping[EngineId, EngineAddress],
    ) -> None:
        self.router: Final = router
        self._put: Final = put
        self._calls: Final = calls
        self._client: Final = client
        self._addresses: Final = addresses
        self._nursery: trio.Nursery | None = None
        self.active: Final[set[EngineId]] = set()
        """Engines that have sent anything since the last check."""
        self.responding: Final[set[EngineId]] = set()
        """Engines that have been asked, and have responded since the last check."""
        self.idle: Final[set[EngineId]] = set()
        """Of these, those that have run no step since they responded before."""
        self._steps: Final[dict[EngineId, bytes]] = {}
        """The steps of each engine that has responded."""
        self._asking: Final[set[EngineId]] = set()
        """Engines that have been asked, and have not responded."""

    async def run(self) -> None:
        """Check for ever, or not at all if the router has no such rule."""
        router, rule = self.router, self.router.rules.stall
        if rule is None or not isinstance(router, WatchingRouter):
            return
        async with trio.open_nursery() as self._nursery:
            while True:
                await trio.sleep(rule.check_ns / S)
                if router.attempts or router.stalled:
                    quiet = tuple(self._look())
                    active, responding, idle = map(tuple, map(sorted, (self.active, self.responding, self.idle)))
                    self._put(EnginesChecked(active, responding, idle, quiet))
                for found in (self.active, self.responding, self.idle):
                    found.clear()

    def ask(self, effect: AskEngine) -> None:
        """Ask an engine whether it responds, unless it is being asked."""
        address = self._addresses.get(effect.engine)
        if address is not None and effect.engine not in self._asking and self._nursery is not None:
            self._asking.add(effect.engine)
            self._nursery.start_soon(self._ask, address)

    async def _ask(self, address: EngineAddress) -> None:
        """Ask an engine, for a few times the shortest silence of a stalled one: the connection may be lost."""
        rule, at = self.router.rules.stall, address.http
        assert rule is not None
        try:
            with trio.move_on_after(LIMITS_ASKED * rule.least * rule.check_ns / S):
                async with self._client.request("GET", at.host, at.port, "/health") as response:
                    self._responded(address.engine, first(response.headers, STEPS))
                    await response.read()
        except UpstreamError as error:
            log_tls_failure(address.engine, error)
            cause = error.__cause__
            if error.kind != "timeout" and getattr(cause, "errno", None) not in UNREACHABLE:
                self.responding.add(address.engine)
        finally:
            self._asking.remove(address.engine)

    def _responded(self, engine: EngineId, steps: bytes | None) -> None:
        """Note a response, with the steps that the engine has run if it names them."""
        self.responding.add(engine)
        if steps is not None:
            if self._steps.get(engine) == steps:
                self.idle.add(engine)
            self._steps[engine] = steps

    def _look(self) -> Iterator[RequestId]:
        """Note which engines have sent anything. Yields the attempts of which nothing has come, although their answers
        have begun."""
        for call in self._calls.values():
            pieces, attempt = call.pieces, call.answer.streaming
            pieces.look()
            if call.responder.waits_for_client:
                self.active.add(pieces.source)
            elif attempt is not None and not pieces.arrived:
                yield attempt
            pieces.arrived = False


def log_watched(effect: EngineWatched) -> None:
    """Log that the router relies on an engine's answers, or no longer does."""
    match effect.state:
        case "stalled":
            log.warning(
                "%s owes answers and has sent nothing for too long: its requests are retried or resumed elsewhere, and "
                "it gets no new ones for now (router.stalled_after_s)",
                effect.engine,
            )
        case "trial":
            log.info("%s is tried again: it gets one request at a time until it answers", effect.engine)
        case "answers":
            log.info("%s gets requests again", effect.engine)
