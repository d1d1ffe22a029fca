"""Named guards against faults of the originals in the transfer of a piece: memories and pieces are the same without.

With all guards, the default and `strict`, none of the faults of vLLM #18242 and #18332 can happen. A method as
published lacks the guards that its original lacks. The code of each rule reads its guard, and `pdflow check methods`
shows the faults that the guards prevent.
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
    """A prompt gets memory for all its pieces before the first is sent. Otherwise each piece asks when it arrives: a
    full ring holds parts of prompts of which none can complete (#18332), and a full buffer refuses layers (#18242)."""

    survives_exhaustion: bool = True
    """D's listener refuses a piece for which it has no memory. Otherwise the pool's error ends the listener's thread,
    and the rank receives nothing more from any peer (#18242)."""

    invalidates_lost: bool = True
    """If a piece is lost, its prompt is lost and computed again. Otherwise the piece is skipped, and D decodes whatever
    its blocks contained (#18242)."""

    indexes_by_piece: bool = True
    """A token's address is counted from the start of its piece's memory. Otherwise it is counted from the start of the
    prompt, which is the same for the first chunk only (#18332)."""

    ends_receives: bool = True
    """A receive ends when its P has died. Otherwise its receiver waits forever: receives have no timeout (#18242,
    #18332)."""

    ranks_by_address: bool = True
    """The addresses of two ranks decide which is rank 0 of their group. Otherwise it is the one that asks for the
    group: if both ask at once, each waits forever in its own group (#18242)."""


class Loss(Enum):
    """The outcome for a prompt of which a piece will not land."""

    ENDS = "the prompt is lost"
    SKIPPED = "the prompt continues without the piece"
    AWAITED = "the receiver waits for the piece"


def loss_of(guards: Guards, p_has_died: bool) -> Loss:
    """Return the outcome for a prompt if the operation of a piece has failed, or P no longer has a piece, or P has
    died."""
    if p_has_died:
        return Loss.ENDS if guards.ends_receives else Loss.AWAITED
    return Loss.ENDS if guards.invalidates_lost else Loss.SKIPPED


def may_corrupt(guards: Guards) -> bool:
    """Whether D may decode KV that is not its prompt's."""
    return not (guards.invalidates_lost and guards.indexes_by_piece)


def effective_timers(timers: Timers, guards: Guards) -> Timers:
    """Return the timers in effect: without `ends_receives` no silence ends a wait before its request's deadline."""
    if guards.ends_receives:
        return timers
    dead_ns, stall_ns = (max(one, timers.deadline_ns) for one in (timers.dead_ns, timers.stall_ns))
    return msgspec.structs.replace(timers, dead_ns=dead_ns, stall_ns=stall_ns)
