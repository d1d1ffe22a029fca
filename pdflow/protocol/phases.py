"""The phases of cells and the legal changes between them, from which the diagrams of spec 4 are generated.

A test steps every rule and compares its result with these tables; the `becoming_*` methods of the cells are the only
code that changes a phase.
"""

from __future__ import annotations

from enum import IntEnum


class ProducerPhase(IntEnum):
    """The phase of one prefill product at one P rank, with at most one registration."""

    OPEN = 0
    """A registration waits for its prefill."""
    LEASED = 1
    """The prompt is computed and leased; no D has registered (push) or finished reading (pull)."""
    JOINING = 2
    """The prompt is computed and a D rank has registered; other target D ranks have not."""
    READY = 3
    """The prompt is matched and pinned; P waits for the connection to D."""
    IN_FLIGHT = 4
    """WRITEs are posted. Only their end may free the source."""
    SETTLING = 5
    """Every handle is final; a flush or a fence must still prove that no byte can land."""
    GONE = 6
    """The cell is removed: this rank no longer holds the prompt, or the registration ended without a prompt."""


PRODUCER_PHASES: dict[ProducerPhase, frozenset[ProducerPhase]] = {
    ProducerPhase.OPEN: frozenset(
        {
            ProducerPhase.OPEN,
            ProducerPhase.LEASED,
            ProducerPhase.JOINING,
            ProducerPhase.READY,
            ProducerPhase.IN_FLIGHT,
            ProducerPhase.GONE,
        }
    ),
    ProducerPhase.LEASED: frozenset(
        {
            ProducerPhase.LEASED,
            ProducerPhase.JOINING,
            ProducerPhase.READY,
            ProducerPhase.IN_FLIGHT,
            ProducerPhase.GONE,
        }
    ),
    ProducerPhase.JOINING: frozenset(
        {
            ProducerPhase.JOINING,
            ProducerPhase.LEASED,
            ProducerPhase.READY,
            ProducerPhase.IN_FLIGHT,
            ProducerPhase.GONE,
        }
    ),
    ProducerPhase.READY: frozenset(
        {ProducerPhase.READY, ProducerPhase.LEASED, ProducerPhase.IN_FLIGHT, ProducerPhase.GONE}
    ),
    ProducerPhase.IN_FLIGHT: frozenset(
        {ProducerPhase.IN_FLIGHT, ProducerPhase.SETTLING, ProducerPhase.LEASED, ProducerPhase.GONE}
    ),
    ProducerPhase.SETTLING: frozenset({ProducerPhase.SETTLING, ProducerPhase.LEASED, ProducerPhase.GONE}),
    ProducerPhase.GONE: frozenset(),
}


class ConsumerPhase(IntEnum):
    """The phase of one request at the D scheduler, until it is loaded or its blocks are free again."""

    HELD = 0
    """The prefill engine has reached its block limit at this D: the request is not in the engine's queue yet."""
    QUEUED = 1
    """The request is in the engine's queue; D renews P's lease for it."""
    WAITING = 2
    """D has registered at every P rank (push) or ordered every READ (pull); shards arrive."""
    QUARANTINED = 3
    """The request is resolved; a writer may still run, so its blocks are not reused."""
    GONE = 4
    """The cell is removed: the request is committed, or resolved and its blocks are free."""


CONSUMER_PHASES: dict[ConsumerPhase, frozenset[ConsumerPhase]] = {
    ConsumerPhase.HELD: frozenset({ConsumerPhase.HELD, ConsumerPhase.QUEUED, ConsumerPhase.GONE}),
    ConsumerPhase.QUEUED: frozenset({ConsumerPhase.QUEUED, ConsumerPhase.WAITING, ConsumerPhase.GONE}),
    ConsumerPhase.WAITING: frozenset({ConsumerPhase.WAITING, ConsumerPhase.QUARANTINED, ConsumerPhase.GONE}),
    ConsumerPhase.QUARANTINED: frozenset({ConsumerPhase.QUARANTINED, ConsumerPhase.GONE}),
    ConsumerPhase.GONE: frozenset(),
}
