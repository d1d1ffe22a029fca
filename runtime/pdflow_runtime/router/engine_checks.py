"""Checks of which engines have sent anything of an answer, for the rule of stalled engines (`pdflow.routing.watching`).

Legs note the engine of each piece that comes. At the interval of the rule the router's endpoint gets what was noted. An
engine whose answer waits for its client counts as active: nothing is received from it meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Final

import trio

from pdflow.protocol.values import EngineId, S
from pdflow.routing.effects import EngineWatched
from pdflow.routing.events import EnginesChecked
from pdflow.routing.governed import GovernedRouter
from pdflow.routing.watching import WatchingRouter
from pdflow_runtime.router.call import Call

log = logging.getLogger(__name__)


class EngineChecks:
    """The checks of one router. Args: `put` hands an event to its endpoint; `calls` are those under way."""

    def __init__(
        self, router: GovernedRouter, put: Callable[[EnginesChecked], None], calls: Mapping[int, Call]
    ) -> None:
        self.router: Final = router
        self._put: Final = put
        self._calls: Final = calls
        self.active: Final[set[EngineId]] = set()
        """Engines that have sent anything since the last check."""

    async def run(self) -> None:
        """Check for ever, or not at all if the router has no such rule."""
        router, rule = self.router, self.router.rules.stall
        if rule is None or not isinstance(router, WatchingRouter):
            return
        while True:
            await trio.sleep(rule.check_ns / S)
            if router.attempts or router.stalled:
                self._look()
                self._put(EnginesChecked(tuple(sorted(self.active))))
            self.active.clear()

    def _look(self) -> None:
        for call in self._calls.values():
            call.pieces.look()
            if call.responder.waits_for_client:
                self.active.add(call.pieces.source)


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
