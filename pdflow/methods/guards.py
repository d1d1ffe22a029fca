"""Named guards against faults of the originals on a piece's way: the same memories and pieces, with or without.

With all of them, the default and `strict`, none of the faults of SEED_SYSTEMS sections 1 and 2 can happen. A method as
it was published lacks those that its original lacks. Each is read where its rule stands, and `pdflow check methods`
shows what they keep away.
"""

from __future__ import annotations

from enum import Enum

import attrs
import msgspec

from pdflow.protocol.timers import Timers


@attrs.frozen(kw_only=True)
class Guards:
    """The guards of one dialect of a method. A docstring per guard says what both values mean. Messages and leases have
    theirs in `protocol/dialect.py`."""

    reserves_whole: bool = True
    """A prompt gets room for all its pieces before the first goes. Otherwise each piece asks when it comes: a full ring
    holds parts of prompts of which none can end (#18332), and a full buffer refuses layers (#18242)."""

    survives_exhaustion: bool = True
    """D's listener answers a piece that finds no room with a refusal. Otherwise the pool's error ends its thread, and
    the rank takes nothing in any more, from any peer (#18242)."""

    invalidates_lost: bool = True
    """A prompt of which a piece is lost is lost, and computed again. Otherwise the piece is skipped, and D decodes with
    whatever its blocks had there (#18242)."""

    indexes_by_piece: bool = True
    """Tokens are found from where their piece's part of memory begins. Otherwise from where the prompt does, which is
    the same for the first chunk only (#18332)."""

    ends_receives: bool = True
    """What is under way from a P that has died is over. Otherwise its receiver waits for ever: receives have no timeout
    (#18242, #18332)."""

    ranks_by_address: bool = True
    """Which of two is rank 0 of their group follows from their addresses. Otherwise the one that asks for the group
    is: if both do at once, each waits for ever in a group of its own (#18242)."""


class Loss(Enum):
    """The outcome for a prompt of which a piece will not land."""

    ENDS = "the prompt is lost"
    SKIPPED = "the prompt continues without the piece"
    AWAITED = "the receiver waits for the piece"


def loss_of(guards: Guards, p_has_died: bool) -> Loss:
    """Return the outcome for a prompt of which the operation of a piece has failed, P has a piece no more, or P has
    died."""
    if p_has_died:
        return Loss.ENDS if guards.ends_receives else Loss.AWAITED
    return Loss.ENDS if guards.invalidates_lost else Loss.SKIPPED


def may_corrupt(guards: Guards) -> bool:
    """Whether D may decode with KV that is not its prompt's."""
    return not (guards.invalidates_lost and guards.indexes_by_piece)


def effective_timers(timers: Timers, guards: Guards) -> Timers:
    """Return the timers in effect: without `ends_receives` no silence ends a wait before its request's deadline."""
    if guards.ends_receives:
        return timers
    dead_ns, stall_ns = (max(one, timers.deadline_ns) for one in (timers.dead_ns, timers.stall_ns))
    return msgspec.structs.replace(timers, dead_ns=dead_ns, stall_ns=stall_ns)
