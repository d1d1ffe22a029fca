"""The state of a store's node, for people: as an engine's, with the store's memory in place of KV blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdflow.methods.store.ledger import Lookup
from pdflow.protocol.values import S
from pdflow_runtime.clock import now_ns
from pdflow_runtime.observe.state import MOST, EngineState, RequestState
from pdflow_runtime.store.node import LiveStoreNode, StoreCall


def state_of(node: LiveStoreNode) -> EngineState:
    memory, ledger = node.memory, node.ledger
    now = now_ns()
    oldest = sorted(node.calls.values(), key=lambda call: call.begun_ns)[:MOST]
    return EngineState(
        engine=node.name,
        role="store",
        incarnation=f"{node.config.incarnation:016x}",
        blocks=memory.pool.num_blocks,
        free=memory.pool.free,
        quarantined=0,
        waiting=len(memory.waiting),
        loading=len(ledger.puts) - len(memory.waiting),
        running=len(ledger.offered),
        links=len(node.links.links),
        steps=0,
        open=len(node.calls),
        requests=[RequestState(call.request_id, _state(node, call), (now - call.begun_ns) / S) for call in oldest],
        backing=None if node.backing is None else node.backing.state(),
    )


def _state(node: LiveStoreNode, call: StoreCall) -> str:
    offered = node.ledger.offered.get(call.xid)
    if offered is not None:
        return "found" if isinstance(offered, Lookup) else "stored"
    return "waiting" if call.request_id in node.memory.waiting else "put"


class StoreCollector(Collector):
    """Prometheus metrics of a store's node, read from its state when they are collected."""

    def __init__(self, node: LiveStoreNode) -> None:
        self.node: Final = node

    def collect(self) -> Iterator[Metric]:
        node, memory = self.node, self.node.memory
        gauges = {
            "pdflow_store_blocks": ("KV blocks of the node's memory", memory.pool.num_blocks),
            "pdflow_store_blocks_used": ("KV blocks that hold objects", memory.used),
            "pdflow_store_objects": ("Complete objects, which lookups can find", len(memory.known)),
            "pdflow_store_puts_waiting": ("Puts that wait for free blocks", len(memory.waiting)),
            "pdflow_store_held": ("Prompts being written, or held for a reader", len(memory.held)),
            "pdflow_links": ("Open connections to other ranks", len(node.links.links)),
        }
        for name, (what, value) in gauges.items():
            yield GaugeMetricFamily(name, what, value=value)
        if node.backing is not None:
            state = node.backing.state()
            yield GaugeMetricFamily(
                "pdflow_store_backing_up", "1 if the Valkey or Redis server answers", value=state.up
            )
            yield GaugeMetricFamily(
                "pdflow_store_backing_waiting", "Objects waiting to be written to the server", value=state.waiting
            )
            objects = CounterMetricFamily(
                "pdflow_store_backing_objects", "Objects, by what happened at the server", labels=["what"]
            )
            for what, number in state.objects.items():
                objects.add_metric([what], number)
            yield objects
        notes = CounterMetricFamily("pdflow_notes", "Protocol notes and events of the store, by name", labels=["note"])
        for note, times in node.notes.items():
            notes.add_metric([note], times)
        yield notes
