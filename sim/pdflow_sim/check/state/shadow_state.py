"""What the explorer knows and no endpoint does: who owns the blocks, what operations may still do, what has landed.

Ghosts never reach an endpoint. What effects make of them, and what that violates, is invariant_checker.py's.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import Any, NamedTuple

CRASH = "crash"
"""In an invariant's place: an endpoint raised."""


class Broken(AssertionError):  # noqa: N818 (what happened, not which kind of error)
    """An invariant does not hold. `name` is S1 to S9, L6 (another engine's trouble), or L for liveness."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(name, what)
        self.name = name
        self.what = what
        self.state: tuple[int, ...] | None = None
        """From which state not everything ends, or ends well."""

    def __str__(self) -> str:
        return f"{self.name}: {self.what}"


class PromptStage(IntEnum):
    """A prompt's KV at P."""

    ABSENT = 0
    QUEUED = 1
    HELD = 2
    RELEASED = 3
    DEAD = 4
    COMPUTED = 5
    """And its engine has not said so."""


class RequestStage(IntEnum):
    """A request at D. RESOLVED still holds blocks, FREED none. From GIVEN on: only where its engine takes its time."""

    UNREGISTERED = 0
    KNOWN = 1
    ENQUEUED = 2
    ADMITTED = 3
    COMMITTED = 4
    RESOLVED = 5
    FREED = 6
    GIVEN = 7
    """It has blocks, and its engine has not said so."""
    PREEMPTED = 8
    """COMMITTED, and its blocks are others'."""
    DECODED = 9
    LEFT = 10
    """Its client gave it up after its KV had landed."""


BINDING = (RequestStage.ENQUEUED, RequestStage.GIVEN, RequestStage.ADMITTED, RequestStage.RESOLVED)
"""Blocks of D's pool are counted for it."""
DECODING = (RequestStage.COMMITTED, RequestStage.PREEMPTED)
OPEN = (RequestStage.KNOWN, *BINDING)
"""D has not done with it."""


class Flag(IntFlag):
    """What an operation may still do, and what is still to be said of it."""

    IN_FLIGHT = 1
    """Its bytes may still land."""
    NOTIFICATION = 2
    """They have; its notice is under way."""
    ENDED_OK = 4
    ENDED_ERR = 8
    """Its handle has ended, which its owner has not been told."""
    READING = 16
    """Its source may still be read."""
    ERROR_REPORTED = 32
    """Its handle's bad end has been told; bytes may land all the same."""
    ORPHAN = 64
    """The process that posted it is dead."""


IN_FLIGHT, NOTIFICATION, ENDED_OK, ENDED_ERR, READING, ERROR_REPORTED, ORPHAN = (flag.value for flag in Flag)
INITIAL_WORD = 1 << 32
"""What a lease word is as long as nobody has bumped it."""
PIECE = 7
"""Above the flags of an operation: how many pieces of its source are read, and, three bits on, how many have landed."""
OPERATION_TASKS = ("word", "stop")
"""Tasks that are about an operation, not about a peer."""
AGE = PIECE + 6
"""Above them: for how many ticks of its engine's clock it has been under way."""


class Content(IntEnum):
    GOOD = 0
    STALE = 1
    """Some of it was read from blocks that had been released."""
    FOREIGN = 2
    """It is another prompt's, or of other positions."""


class ClientStage(IntEnum):
    """A client of the router, and its one request."""

    AWAY = 0
    WAITING = 1
    GONE = 2
    """It has hung up, and the router has yet to say so."""
    COMPLETED = 3
    FAILED = 4
    CANCELLED = 5


class ShadowState(NamedTuple):
    products: tuple[int, ...]
    stages: tuple[int, ...]
    landed: tuple[int, ...]
    """By request, a bit for each pair of ranks whose operation has landed whole."""
    content: tuple[int, ...]
    """Of what was read for each request, by Content."""
    restarts: tuple[int, ...]
    """By engine, how often it has started again."""
    barred: tuple[int, ...]
    """By request, a bit for each pair of ranks that D's fence, or D's death, has closed to what P may still post."""
    clients: tuple[int, ...] = ()
    """With the router's endpoint in the world: where each client's request is, by ClientStage."""
    legs: tuple[int, ...] = ()
    """By attempt, what the router has made of its legs, by routed_judge.Leg."""


class PartialState:
    """Operations, tasks and ghosts while the effects of one turn change them."""

    __slots__ = ("barred", "clients", "content", "landed", "legs", "ops", "products", "restarts", "stages", "tasks")

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
            self.clients,
            self.legs,
        )


class Interned:
    """Equal values get one small number, in the order of their coming."""

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
