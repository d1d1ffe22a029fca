"""The shadow state, known to the checker and to no endpoint: owners of blocks, open operations, and what has landed.

No endpoint sees any of it. invariant_checker.py applies effects to it, and finds what they violate.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import Any, NamedTuple

CRASH = "crash"
"""In place of an invariant's name in Broken: an endpoint or a core raised an exception."""


class Broken(AssertionError):  # noqa: N818 (what happened, not which kind of error)
    """An invariant does not hold. `name` is S1 to S11, L1 to L12, L for liveness in general, or CRASH."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(name, what)
        self.name = name
        self.what = what
        self.state: tuple[int, ...] | None = None
        """The state from which not everything ends, or ends well; None if the violation is of another kind."""
        self.repeats = ""
        """Of a fair run that does not resolve, the assumption about repeating timers (fairness.py)."""

    def __str__(self) -> str:
        return f"{self.name}: {self.what}"


class PromptStage(IntEnum):
    """The stage of a prompt's KV at P."""

    ABSENT = 0
    QUEUED = 1
    HELD = 2
    RELEASED = 3
    DEAD = 4
    COMPUTED = 5
    """Computed, and its engine has not reported it."""


class RequestStage(IntEnum):
    """The stage of a request at D. RESOLVED still holds blocks, FREED none. Stages from GIVEN on occur only where D's
    engine takes time to report, load or decode."""

    UNREGISTERED = 0
    KNOWN = 1
    ENQUEUED = 2
    ADMITTED = 3
    COMMITTED = 4
    RESOLVED = 5
    FREED = 6
    GIVEN = 7
    """The request has blocks, and its engine has not reported it."""
    PREEMPTED = 8
    """COMMITTED, and its blocks have been given to other requests."""
    DECODED = 9
    LEFT = 10
    """The client gave the request up after its KV had landed."""


BINDING = (RequestStage.ENQUEUED, RequestStage.GIVEN, RequestStage.ADMITTED, RequestStage.RESOLVED)
"""Stages in which D's endpoint counts blocks of its pool for a request."""
DECODING = (RequestStage.COMMITTED, RequestStage.PREEMPTED)
OPEN = (RequestStage.KNOWN, *BINDING)
"""Stages in which D is not done with a request."""


class Flag(IntFlag):
    """The state of a one-sided operation: effects that it may still have, and reports of it that are outstanding."""

    IN_FLIGHT = 1
    """The operation's bytes may still land."""
    NOTIFICATION = 2
    """Its bytes have landed, and their notification is under way."""
    ENDED_OK = 4
    ENDED_ERR = 8
    """Its handle has ended with an error (ENDED_OK: well), which has not been reported to the rank that posted it."""
    READING = 16
    """Its source may still be read."""
    ERROR_REPORTED = 32
    """Its handle's error has been reported; bytes may land all the same."""
    ORPHAN = 64
    """The process that posted it is dead."""
    DISCARDED = 128
    """Its handle had ended well when the other end discarded some of its bytes: flushes fail until it is fenced."""


IN_FLIGHT, NOTIFICATION, ENDED_OK, ENDED_ERR, READING, ERROR_REPORTED, ORPHAN, DISCARDED = (flag.value for flag in Flag)
INITIAL_WORD = 1 << 32
"""The value of a lease word until P changes it."""
PIECE = 8
"""The bit above an operation's flags: from it on, how many pieces of the source are read; three bits on, how many have
landed."""
OPERATION_TASKS = ("word", "stop")
"""Kinds of tasks that are about an operation, not about a peer."""
AGE = PIECE + 6
"""The bit above the pieces: from it on, for how many ticks of its engine's clock an operation has been under way."""


class Content(IntEnum):
    GOOD = 0
    STALE = 1
    """Some of it was read from blocks that had been released."""
    FOREIGN = 2
    """It belongs to another prompt, or to other positions."""


class ClientStage(IntEnum):
    """The stage of a client of the router, which has one request."""

    AWAY = 0
    WAITING = 1
    GONE = 2
    """The client has hung up, and the router has not ended its request yet."""
    COMPLETED = 3
    FAILED = 4
    CANCELLED = 5


WHOLE = 1
"""The engine is down."""


def rank_bit(rank: int) -> int:
    """Return the bit of a rank that has died alone."""
    return 2 << rank


class ShadowState(NamedTuple):
    products: tuple[int, ...]
    stages: tuple[int, ...]
    landed: tuple[int, ...]
    """By request, a bit for each pair of ranks whose operation has landed whole."""
    content: tuple[int, ...]
    """By request, the Content of what was read for it."""
    restarts: tuple[int, ...]
    """By engine, how often it has started again."""
    barred: tuple[int, ...]
    """By request, a bit for each pair of ranks that D's fence, or D's death, has closed to operations that P may still
    post."""
    down: tuple[int, ...] = ()
    """Where P may be down: by engine, WHOLE if no process of it is there now, and a bit for each rank that has died
    alone (`rank_bit`)."""
    refused: tuple[int, ...] = ()
    """By engine, whether it has refused a handshake while it lived; empty while none has."""
    clients: tuple[int, ...] = ()
    """With the router's endpoint in the world: by client, its ClientStage."""
    legs: tuple[int, ...] = ()
    """By attempt, the state of its legs at the router, by routed.invariant_checker.LegState."""

    def is_gone(self, engine: int, rank: int) -> bool:
        """True if there is no process of this rank now."""
        return bool(self.down and self.down[engine] & (WHOLE | rank_bit(rank)))


class PartialState:
    """Operations, tasks and shadow state while the effects of one turn change them."""

    __slots__ = (
        "barred",
        "clients",
        "content",
        "down",
        "landed",
        "legs",
        "ops",
        "products",
        "refused",
        "restarts",
        "stages",
        "tasks",
    )

    def __init__(
        self, ops: tuple[tuple[int, int], ...], tasks: tuple[tuple[str, int, int], ...], shadow: ShadowState
    ) -> None:
        self.ops = list(ops)
        self.tasks = list(tasks)
        self.products = list(shadow.products)
        self.stages = list(shadow.stages)
        self.landed = list(shadow.landed)
        self.content = list(shadow.content)
        self.restarts = shadow.restarts
        self.barred = shadow.barred
        self.down = shadow.down
        self.refused = shadow.refused
        self.clients = shadow.clients
        self.legs = shadow.legs

    def shadow(self) -> ShadowState:
        return ShadowState(
            tuple(self.products),
            tuple(self.stages),
            tuple(self.landed),
            tuple(self.content),
            self.restarts,
            self.barred,
            self.down,
            self.refused,
            self.clients,
            self.legs,
        )


class Interned:
    """A table of values: equal values get one small number, counted in the order in which they first occur."""

    __slots__ = ("ids", "values")

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.ids: dict[Any, int] = {}

    def of(self, value: Any) -> int:
        found = self.ids.get(value)
        if found is None:
            found = self.ids[value] = len(self.values)
            self.values.append(value)
        return found
