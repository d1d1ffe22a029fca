"""The metrics of the engines and store nodes as the router knows them, read when they are collected."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdflow_runtime.router.members import Members

LABELS: Final = ("engine", "role")


class MembersCollector(Collector):
    """Whether each engine is up, drained, silent, stalled. Args: `expected` returns the engines that are up or should
    be: not those that may be added."""

    def __init__(self, members: Members, expected: Callable[[], Iterable[str]]) -> None:
        self.members: Final = members
        self.expected: Final = expected

    def collect(self) -> Iterator[Metric]:
        members = self.members
        up = GaugeMetricFamily(
            "pdflow_router_engine_up", "1 if the engine or store node is known and not silent", labels=LABELS
        )
        drained = GaugeMetricFamily(
            "pdflow_router_engine_drained", "1 if the engine gets no new requests until it is resumed", labels=LABELS
        )
        silent = GaugeMetricFamily(
            "pdflow_router_engine_silent",
            "1 if the engine has missed its reports (router.silent_after_s)",
            labels=LABELS,
        )
        stalled = GaugeMetricFamily(
            "pdflow_router_engine_stalled",
            "1 if the engine owes answers and has sent nothing for too long (router.stalled_after_s)",
            labels=LABELS,
        )
        drained_engines, stalled_engines = members.drained, members.stalled
        for name in self.expected():
            labels = name, members.seats[name][0]
            known, member = name in members.addresses, members.is_member(name)
            up.add_metric(labels, known and member)
            drained.add_metric(labels, name in drained_engines)
            silent.add_metric(labels, known and not member)
            stalled.add_metric(labels, name in stalled_engines)
        for name, address in members.stores.items():
            up.add_metric((name, "store"), address is not None)
        yield from (up, drained, silent, stalled)
