"""The batch scheduler behind a core: what it is asked by handle, and what it answers, as events of `events.py`.

The only place outside the engines that knows how a scheduler says no, and whose the blocks of a dropped sequence are.
"""

from __future__ import annotations

from pdflow.engine.engine import Engine
from pdflow.engine.sequence import Dropped, NeverFitsError, Phase, Sequence
from pdflow.protocol.values import Instant
from pdflow.serving.events import EngineDropped, EngineRejected


def enqueue(engine: Engine, seq: Sequence, now: Instant) -> EngineRejected | None:
    """Queue it. The answer, if it can never be computed there."""
    try:
        engine.submit(seq, now)
    except NeverFitsError as error:
        return EngineRejected(seq.handle, str(error))
    return None


def drop(engine: Engine, seq: Sequence, now: Instant) -> EngineDropped:
    """Have the engine give it up."""
    return dropped(seq, engine.drop(seq, now))


def dropped(seq: Sequence, answer: Dropped) -> EngineDropped:
    """What a scheduler's answer means for the blocks."""
    left = seq.allocation if answer is Dropped.BLOCKS_ARE_YOURS else None
    return EngineDropped(seq.handle, left, answer is Dropped.NOT_HERE)


# For displays.


def is_queued(seq: Sequence) -> bool:
    """Whether it waits for a seat and blocks."""
    return seq.phase is Phase.WAITING


def awaits_kv(seq: Sequence) -> bool:
    """Whether its KV is on its way, or it has not come to the engine yet."""
    return seq.phase in (Phase.NEW, Phase.LOADING)
