"""Calls into the batch scheduler behind a core, with its answers as events of `events.py`.

Only this module, outside the engines, knows how a scheduler refuses a sequence, and which side frees the blocks of a
dropped one.
"""

from __future__ import annotations

from pdflow.engine.engine import Engine
from pdflow.engine.sequence import Dropped, NeverFitsError, Phase, Sequence
from pdflow.protocol.values import Instant
from pdflow.serving.events import EngineDropped, EngineRejected


def enqueue(engine: Engine, seq: Sequence, now: Instant) -> EngineRejected | None:
    """Queue a sequence. Return EngineRejected if the engine can never compute it, else None."""
    try:
        engine.submit(seq, now)
    except NeverFitsError as error:
        return EngineRejected(seq.handle, str(error))
    return None


def drop(engine: Engine, seq: Sequence, now: Instant) -> EngineDropped:
    """Have the engine drop a sequence, and return its answer as an event."""
    return dropped(seq, engine.drop(seq, now))


def dropped(seq: Sequence, answer: Dropped) -> EngineDropped:
    """Return a scheduler's answer to a drop as an event: blocks that are left to free, and whether it came too late."""
    left = seq.allocation if answer is Dropped.BLOCKS_ARE_YOURS else None
    return EngineDropped(seq.handle, left, answer is Dropped.NOT_HERE)


# For displays.


def is_queued(seq: Sequence) -> bool:
    """Whether the sequence waits for a place in the batch and for blocks."""
    return seq.phase is Phase.WAITING


def awaits_kv(seq: Sequence) -> bool:
    """Whether the sequence's KV is on its way, or the sequence has not come to the engine yet."""
    return seq.phase in (Phase.NEW, Phase.LOADING)
