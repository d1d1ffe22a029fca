"""Whether an endpoint would be woken for what it waits for: a deadline that has come nearer stands in its heap too.

Which timer fires is chosen by the explorer, or by its clocks, from the truth in the cells. A driver has only the heap,
which may lie early, never late (`pdflow/protocol/deadlines.py`); forks begin with an empty one, so that what stands in
it after an event was pushed by that event.
"""

from __future__ import annotations

from typing import Any

from pdflow.protocol.consumer.scheduler import ConsumerScheduler
from pdflow.protocol.producer.rank import ProducerRank
from pdflow.protocol.timers import Timer
from pdflow.protocol.values import NEVER, Instant


def overslept(before: Any, after: Any) -> Timer | None:
    """A timer whose deadline came nearer, or came into being, in the event between these two, and that nothing was
    pushed for. One entry of a key may stand for another of the same, if it is earlier."""
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
