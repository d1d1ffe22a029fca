"""The phases of cells and the legal changes between them, from which the diagrams in docs/ are generated.

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
    """The prompt and a registration are here, but not yet the registrations of all target D ranks."""
    READY = 3
    """Matched and pinned; waiting for the connection to D."""
    IN_FLIGHT = 4
    """WRITEs are posted. Nothing but their end may free the source."""
    SETTLING = 5
    """Every handle is final; a flush or a fence must still prove that no byte can land."""
    GONE = 6


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
    """Its prefill engine is at its block limit here: not yet in the engine's queue."""
    QUEUED = 1
    """In the engine's queue; P's lease is renewed for it."""
    WAITING = 2
    """Registered at every P rank (push), or every READ ordered (pull); shards are landing."""
    QUARANTINED = 3
    """The request is resolved; some writer may still run."""
    GONE = 4


CONSUMER_PHASES: dict[ConsumerPhase, frozenset[ConsumerPhase]] = {
    ConsumerPhase.HELD: frozenset({ConsumerPhase.HELD, ConsumerPhase.QUEUED, ConsumerPhase.GONE}),
    ConsumerPhase.QUEUED: frozenset({ConsumerPhase.QUEUED, ConsumerPhase.WAITING, ConsumerPhase.GONE}),
    ConsumerPhase.WAITING: frozenset({ConsumerPhase.WAITING, ConsumerPhase.QUARANTINED, ConsumerPhase.GONE}),
    ConsumerPhase.QUARANTINED: frozenset({ConsumerPhase.QUARANTINED, ConsumerPhase.GONE}),
    ConsumerPhase.GONE: frozenset(),
}
