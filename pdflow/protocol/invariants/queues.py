"""A check that no request is overtaken in a queue (L11): what waits is granted in the order in which it came.

Two queues hold requests back where memory has a limit: at D, the requests of a prefill engine that has reached its
block limit (spec 2.13), and at either engine, prompts that wait for staging memory (`pdflow/methods/staging.py`). A
later one may be granted first only if every earlier one has left the queue. All other queues (frames, READs and cells
that wait for a connection) are emptied at once.

Off the hot path: drivers never call this.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from pdflow.protocol.consumer.cell import HELD
from pdflow.protocol.consumer.scheduler import ConsumerScheduler


def overtaken(before: object, after: object) -> str:
    """Return, in words, which held request an event has let a later one overtake; "" if none. `before` and `after` are
    an endpoint before and after the event."""
    if not isinstance(before, ConsumerScheduler) or not isinstance(after, ConsumerScheduler):
        return ""
    for peer in after.store.peers.values():
        waits = {name for name in peer.requests if after.cells[name].phase is HELD}
        if not waits:
            continue
        granted = {
            name
            for name in peer.requests
            if name not in waits and (name not in before.cells or before.cells[name].phase is HELD)
        }
        if found := overtaken_in(peer.requests, waits, granted):
            return found
    return ""


def overtaken_in(order: Iterable[str], waits: Container[str], granted: Container[str]) -> str:
    """Return, in words, which entry of a queue waits although a later one has just been granted; "" if none.

    Args:
        order: the entries in the order in which they came.
        waits: those that still wait.
        granted: those that have been granted now.
    """
    first = ""
    for name in order:
        if name in waits:
            first = first or name
        elif first and name in granted:
            return f"{name} has overtaken {first}, which came before it and still waits"
    return ""
