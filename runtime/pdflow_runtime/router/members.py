"""Who is there, for the live router: where engines and nodes of a store are, in which life, and what its endpoint is
told of that.

Engines are heard of from the supervisor that has started them, or from themselves; in the latter case who is silent is
no member, by the rule that the endpoint has (`pdflow/routing/heartbeats.py`). The endpoint knows nothing of a store.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

from pdflow.routing.events import EngineChanged, EngineJoins, EngineLeaves, EngineLost, EngineReported, RouterEvent
from pdflow.routing.governed import GovernedRouter
from pdflow.routing.heartbeats import Roll, Seat
from pdflow_runtime.clock import now_ns
from pdflow_runtime.process.addresses import EngineAddress, EngineGone, EngineLeaving, News

log = logging.getLogger(__name__)


class Members:
    """Args: `stores` are the names of a store's nodes; `put` hands the endpoint an event; `close_connections` closes
    what is kept open to an engine that is gone."""

    def __init__(
        self,
        router: GovernedRouter,
        stores: Sequence[str],
        put: Callable[[RouterEvent], None],
        close_connections: Callable[[EngineAddress], None],
    ) -> None:
        self.router: Final = router
        self.reports: Final = router.roll is not None
        """Engines report, and nothing else says who is up."""
        self.seats: Final[dict[str, Seat]] = {
            **{info.engine: ("prefill", number) for number, info in enumerate(router.prefill)},
            **{info.engine: ("decode", number) for number, info in enumerate(router.decode)},
        }
        self.addresses: Final[dict[str, EngineAddress]] = {}
        """Engines that are there, by name."""
        self.leaving: Final[set[str]] = set()
        """Engines of which one life ends, or has ended: the next one gets requests again."""
        self.drained_by_operator: Final[set[str]] = set()
        """Engines that an operator has drained: they get nothing new in whatever life, until he says so."""
        self.ended: Callable[[str], None] = lambda name: None
        """Told of an engine that nobody starts again unasked."""
        self._known_here: Final[set[str]] = set()
        """Engines that this router has heard of, or an order about: what an earlier one was told counts no more."""
        self._put: Final = put
        self._close_connections: Final = close_connections
        self._stores: Final[dict[str, EngineAddress | None]] = dict.fromkeys(stores)
        self._store_roll: Final = None if router.roll is None else Roll(router.roll.silence_ns)
        """By their numbers, as if they were prefill engines."""

    @property
    def stores(self) -> dict[str, EngineAddress | None]:
        """Every node of the store by its name, in order, and where it is if it is there."""
        there = enumerate(self._stores.items())
        return {name: address if self._has_store(number) else None for number, (name, address) in there}

    def is_up(self, name: str) -> bool:
        """Whether this engine gets requests."""
        role, number = self.seats[name]
        choice = self.router.prefill_choice if role == "prefill" else self.router.decode_choice
        return choice.up[number] and self.is_member(name)

    def is_member(self, name: str) -> bool:
        """Whether it has reported lately, where engines do."""
        return _has(self.router.roll, self.seats[name])

    @property
    def drained(self) -> frozenset[str]:
        """Engines that get nothing new, whatever life they are in."""
        membership = self.router.membership
        return frozenset((*membership.leaving, *membership.left)) - self.leaving

    def set_enabled(self, name: str, up: bool) -> None:
        """An operator wants it to get something new, or nothing."""
        self._known_here.add(name)
        if up:
            self.drained_by_operator.discard(name)
            self.resume(name)
        else:
            self.drained_by_operator.add(name)
            self.drain(name)

    def drain(self, name: str) -> None:
        self._put(EngineLeaves(name))

    def resume(self, name: str) -> None:
        self.leaving.discard(name)
        self._put(EngineJoins(name))
        self._put(EngineChanged(name, name in self.addresses))

    def apply_report(self, news: News) -> str:
        """An engine is up, leaving, or gone. Why nobody takes note of that, if so."""
        name = news.engine
        if name in self._stores:
            return self._apply_store_report(news)
        if name not in self.seats:
            return f"there is no engine {name}; there are {', '.join(self.seats)}"
        known = self.addresses.get(name)
        match news:
            case EngineAddress():
                return self._up(news, known)
            case EngineLeaving(_, incarnation) if known is not None and known.incarnation == incarnation:
                if name not in self.drained:
                    self.leaving.add(name)
                    self.drain(name)
            case EngineGone():
                if is_end_of(news, known):
                    self._lose(self.addresses[name])
                if news.for_good:
                    self.ended(name)
        return ""

    def _up(self, address: EngineAddress, known: EngineAddress | None) -> str:
        """The report of an engine. The first one of a life is the end of the life before."""
        name = address.engine
        if known is not None and known.incarnation != address.incarnation:
            if address.born_ns < known.born_ns and self.is_member(name):
                return younger(known)
            self._lose(known)
            known = None
        if known is None:
            self.addresses[name] = address
            log.info("%s is up at %s:%d", name, address.http.host, address.http.port)
            if name in self.leaving:
                self.resume(name)
            if address.drained and name not in self._known_here:
                log.info("%s is drained: the router before this one was told so", name)
                self.set_enabled(name, False)
            self._known_here.add(name)
        if self.reports:
            role, number = self.seats[name]
            infos = self.router.prefill if role == "prefill" else self.router.decode
            if known is not None and not self.is_up(name) and name not in self.drained:
                log.info("%s reports again", name)
            self._put(EngineReported(role, number, infos[number]))
        elif known is None:
            self._put(EngineChanged(name, True))
        return ""

    def _lose(self, address: EngineAddress) -> None:
        """Its legs fail now. Where engines report, its silence is not waited for either."""
        name = address.engine
        del self.addresses[name]
        self._close_connections(address)
        if self.reports and name not in self.drained:
            self.leaving.add(name)
            self.drain(name)
        self._put(EngineLost(name))
        log.warning("%s is gone", name)

    # Nodes of the store.

    def _apply_store_report(self, news: News) -> str:
        """One is up, or gone; one that leaves is there until then."""
        name, known = news.engine, self._stores[news.engine]
        number = list(self._stores).index(name)
        match news:
            case EngineAddress():
                if known is None or known.incarnation != news.incarnation:
                    if known is not None and news.born_ns < known.born_ns and self._has_store(number):
                        return younger(known)
                    log.info("%s is up at %s:%d", name, news.http.host, news.http.port)
                    self._stores[name] = news
                if self._store_roll is not None:
                    self._store_roll.pass_to(now_ns())
                    self._store_roll.reported(("prefill", number))
            case EngineGone() if is_end_of(news, known):
                log.warning("%s is gone", name)
                self._stores[name] = None
        return ""

    def _has_store(self, number: int) -> bool:
        return _has(self._store_roll, ("prefill", number))


def _has(roll: Roll | None, seat: Seat) -> bool:
    """Whether it is a member now: the roll itself learns of a silence with the next event."""
    return roll is None or roll.members.get(seat, 0) > now_ns()


def is_end_of(news: EngineGone, known: EngineAddress | None) -> bool:
    """Of the life that is known."""
    return known is not None and news.incarnation in (None, known.incarnation)


def younger(known: EngineAddress) -> str:
    """Why another life is not believed."""
    return f"a younger {known.engine} is at {known.http.host}:{known.http.port}"
