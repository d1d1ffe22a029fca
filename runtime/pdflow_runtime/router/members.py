"""The engines and store nodes that the live router knows: their addresses and incarnations, and the events that its
endpoint gets when these change.

Engines are reported by the supervisor that has started them, or report themselves; in the latter case an engine that is
silent is no member, by the rule that the endpoint has (`pdflow/routing/heartbeats.py`). The endpoint knows nothing of a
store.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

from pdflow.routing.events import EngineChanged, EngineJoins, EngineLeaves, EngineLost, EngineReported, RouterEvent
from pdflow.routing.governed import GovernedRouter
from pdflow.routing.heartbeats import Roll, Seat
from pdflow.routing.watching import WatchingRouter
from pdflow_runtime.clock import now_ns
from pdflow_runtime.process.addresses import DrainOrder, EngineAddress, EngineGone, EngineLeaving, EngineNews

log = logging.getLogger(__name__)


class Members:
    """The engines and store nodes. Args: `stores` are the names of a store's nodes; `put` hands the endpoint an event;
    `close_connections` closes the idle connections to an engine that is gone."""

    def __init__(
        self,
        router: GovernedRouter,
        stores: Sequence[str],
        put: Callable[[RouterEvent], None],
        close_connections: Callable[[EngineAddress], None],
    ) -> None:
        self.router: Final = router
        self.reports: Final = router.roll is not None
        """Whether engines report themselves, and only their reports say which are up."""
        self.seats: Final[dict[str, Seat]] = {
            **{info.engine: ("prefill", number) for number, info in enumerate(router.prefill)},
            **{info.engine: ("decode", number) for number, info in enumerate(router.decode)},
        }
        self.addresses: Final[dict[str, EngineAddress]] = {}
        """Engines that are there, by name."""
        self.leaving: Final[set[str]] = set()
        """Engines of which one incarnation ends, or has ended: the next one gets requests again."""
        self.drained_by_operator: Final[set[str]] = set()
        """Engines that an operator has drained: no incarnation gets requests until an operator resumes them."""
        self.ended: Callable[[str], None] = lambda name: None
        """Called with an engine that ended, and is not started again without an order."""
        self.came_up: Callable[[str], None] = lambda name: None
        """Called with an engine that was down and is up."""
        self.ordered: Callable[[DrainOrder], None] = lambda order: None
        """Called with each order of an operator to drain or resume an engine."""
        self._known_here: Final[set[str]] = set()
        """Engines that this router has a report of, or an order about: an earlier router's orders count no more."""
        self._put: Final = put
        self._close_connections: Final = close_connections
        self._stores: Final[dict[str, EngineAddress | None]] = dict.fromkeys(stores)
        self._store_roll: Final = None if router.roll is None else Roll(router.roll.silence_ns)
        """The nodes' reports, by their numbers, as if they were prefill engines."""

    @property
    def stores(self) -> dict[str, EngineAddress | None]:
        """Every node of the store by its name, in order, with its address; None if it is not up."""
        there = enumerate(self._stores.items())
        return {name: address if self._has_store(number) else None for number, (name, address) in there}

    def is_up(self, name: str) -> bool:
        """True if this engine gets requests."""
        role, number = self.seats[name]
        choice = self.router.prefill_choice if role == "prefill" else self.router.decode_choice
        return choice.up[number] and self.is_member(name)

    def is_member(self, name: str) -> bool:
        """True if the engine has reported lately, where engines report."""
        return _has(self.router.roll, self.seats[name])

    @property
    def stalled(self) -> list[str]:
        """Engines whose answers the router does not rely on, since they have sent none for too long."""
        if not isinstance(self.router, WatchingRouter):
            return []
        return sorted(name for name, seat in self.seats.items() if seat in self.router.stalled)

    @property
    def drained(self) -> frozenset[str]:
        """Engines that get no new requests, in whatever incarnation."""
        membership = self.router.membership
        return frozenset((*membership.leaving, *membership.left)) - self.leaving

    def set_enabled(self, name: str, up: bool) -> None:
        """Resume the engine, or drain it, by an operator's order."""
        self._known_here.add(name)
        if up:
            self.drained_by_operator.discard(name)
            self.resume(name)
        else:
            self.drained_by_operator.add(name)
            self.drain(name)
        self.ordered(DrainOrder(name, not up))

    def drain(self, name: str) -> None:
        self._put(EngineLeaves(name))

    def resume(self, name: str) -> None:
        self.leaving.discard(name)
        self._put(EngineJoins(name))
        self._put(EngineChanged(name, name in self.addresses))

    def apply_order(self, order: DrainOrder) -> None:
        """Apply an order that an earlier router of this supervisor got."""
        if order.engine in self.seats and order.drained != (order.engine in self.drained_by_operator):
            self.set_enabled(order.engine, not order.drained)
        self._known_here.add(order.engine)

    def apply_report(self, news: EngineNews) -> str:
        """Apply a report that an engine is up, leaving, or gone. Returns why the report is rejected, or an empty
        text."""
        name = news.engine
        if name in self._stores:
            return self._apply_store_report(news)
        if name not in self.seats:
            return f"unknown engine {name!r}; known: {', '.join(self.seats)}"
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
        """Apply the report of an engine that is up. The first report of an incarnation ends the one before."""
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
                log.info("%s stays drained: an operator drained it before this router started", name)
                self.set_enabled(name, False)
            self._known_here.add(name)
        if self.reports:
            role, number = self.seats[name]
            infos = self.router.prefill if role == "prefill" else self.router.decode
            if known is not None and not self.is_member(name) and name not in self.drained:
                log.info("%s reports again; it gets requests again", name)
            self._put(EngineReported(role, number, infos[number]))
        elif known is None:
            self._put(EngineChanged(name, True))
        if known is None:
            self.came_up(name)
        return ""

    def _lose(self, address: EngineAddress) -> None:
        """Remove the engine: its legs fail now. Where engines report, its silence is not waited for either."""
        name = address.engine
        del self.addresses[name]
        self._close_connections(address)
        if self.reports and name not in self.drained:
            self.leaving.add(name)
            self.drain(name)
        self._put(EngineLost(name))
        log.warning("%s is down: removed from routing; its open requests fail or are retried (router.on_failure)", name)

    # Nodes of the store.

    def _apply_store_report(self, news: EngineNews) -> str:
        """Apply the report of a node of the store: it is up, or gone; one that leaves stays until it is gone."""
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
                log.warning("%s is down: what it stored is lost; its open puts and gets fail", name)
                self._stores[name] = None
        return ""

    def _has_store(self, number: int) -> bool:
        return _has(self._store_roll, ("prefill", number))


def _has(roll: Roll | None, seat: Seat) -> bool:
    """True if the seat is a member now: the roll itself learns of a silence with the next event."""
    return roll is None or roll.members.get(seat, 0) > now_ns()


def is_end_of(news: EngineGone, known: EngineAddress | None) -> bool:
    """True if the report is of the end of the known incarnation."""
    return known is not None and news.incarnation in (None, known.incarnation)


def younger(known: EngineAddress) -> str:
    """Return why the report of an older incarnation is rejected."""
    return (
        f"another process started later as {known.engine}, at {known.http.host}:{known.http.port}: stop one of the two"
    )
