"""A check that an endpoint's driver would wake it in time: a deadline that has come nearer is in its heap too.

The explorer, or its clocks, choose which timer fires from the deadlines in the cells. A driver has only the heap, whose
entries may be too early, never too late (`pdflow/protocol/deadlines.py`); forks begin with an empty one, so that its
entries after an event were pushed by that event.
"""

from __future__ import annotations

from typing import Any

from pdflow.protocol.consumer.scheduler import ConsumerScheduler
from pdflow.protocol.producer.rank import ProducerRank
from pdflow.protocol.timers import Timer
from pdflow.protocol.values import NEVER, Instant


def overslept(before: Any, after: Any) -> Timer | None:
    """Return a timer whose deadline came nearer, or was set, in the event between these two without an entry pushed for
    it; None if there is none. An earlier entry of the same key counts as the timer's own."""
    if not isinstance(after, (ProducerRank, ConsumerScheduler)):
        return None
    known = {timer: before.deadline(timer) for timer in before.armed()}
    pushed: dict[Any, Instant] = {}
    for at, _, timer in after.deadlines.heap:
        pushed[timer.key] = min(at, pushed.get(timer.key, at))
    for timer in after.armed():
        due: Instant | None = after.deadline(timer)
        was: Instant | None = known.get(timer)
        if due is not None and (was is None or due < was) and pushed.get(timer.key, NEVER) > due:
            return timer
    return None
