"""A plan of faults, resolved: engines by name, times in ns. What a file may say is `pdflow.scenario.schema.faults`.

A plan says what happens, not how: the simulated world applies it in `sim/pdflow_sim/faults/faults.py`. Engines are
named as the scenario counts them ("prefill-0"), whatever id a restarted one has taken. Kinds and words are those of
Chaos Mesh, Toxiproxy and Jepsen where these agree.

The router is not among the engines: nothing here happens to it, nor to its connections to them; but what engines report
to it may be lost on links to `ROUTER`.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import attrs

from pdflow.protocol.values import EngineId

ROUTER: Final = "router"
"""As the receiver of a link: of heartbeats alone."""

Stage: TypeAlias = Literal["start", "in-flight", "landed"]


@attrs.frozen
class Links:
    """Directions between engines: from any of the first to any of the second, for each pair of groups."""

    directions: tuple[tuple[frozenset[EngineId], frozenset[EngineId]], ...]

    def hold(self, sender: EngineId, receiver: EngineId) -> bool:
        """Whether this direction is among them."""
        return any(sender in senders and receiver in receivers for senders, receivers in self.directions)

    def __bool__(self) -> bool:
        return any(senders and receivers for senders, receivers in self.directions)


@attrs.frozen(kw_only=True)
class FaultTimes:
    """At which times a fault acts: from `at_ns` on for `for_ns` (None: for good); every `every_ns` again; or, with
    `rate_per_s`, from times on that are drawn, so many a second while it does not act."""

    at_ns: int = 0
    for_ns: int | None = None
    every_ns: int | None = None
    rate_per_s: float | None = None


@attrs.frozen(kw_only=True)
class Fault:
    """`name` is unique within a plan, and names its stream of random numbers: "drop/0" is the first drop."""

    name: str
    when: FaultTimes


@attrs.frozen(kw_only=True)
class MessageFault(Fault):
    """Of each message over these links, and of these frames (none named: all), this share."""

    links: Links
    frames: frozenset[str] = frozenset()
    probability: float = 1.0


@attrs.frozen(kw_only=True)
class DropMessages(MessageFault):
    pass


@attrs.frozen(kw_only=True)
class Delay(MessageFault):
    """By `delay_ns`, and up to `jitter_ns` more."""

    delay_ns: int
    jitter_ns: int = 0


@attrs.frozen(kw_only=True)
class Duplicate(MessageFault):
    """A copy comes `delay_ns` behind."""

    delay_ns: int = 0


@attrs.frozen(kw_only=True)
class Reorder(MessageFault):
    """Held back until the next message of the same two ranks has overtaken it, for at most `delay_ns`."""

    delay_ns: int


@attrs.frozen(kw_only=True)
class Partition(Fault):
    """Nothing passes."""

    links: Links


@attrs.frozen(kw_only=True)
class Slow(Fault):
    """Bandwidth of the NICs of these engines, or of these named links of the network, divided by `factor`."""

    engines: tuple[EngineId, ...] = ()
    links: tuple[str, ...] = ()
    factor: float


@attrs.frozen(kw_only=True)
class NicDown(Fault):
    """The NIC of this number of each rank of these engines fails."""

    engines: tuple[EngineId, ...]
    nic: int = 0


@attrs.frozen(kw_only=True)
class Crash(Fault):
    """All processes of an engine die, with their memory. None: it does not come back.

    `lands`: what its NICs have been given goes on; otherwise it is cut off.
    """

    engines: tuple[EngineId, ...]
    restart_after_ns: int | None = None
    new_engine_id: bool = False
    same_incarnation: bool = False
    lands: bool = True


@attrs.frozen(kw_only=True)
class PauseEngine(Fault):
    """The whole process stands still; or, if `only_engine`, its running step takes that much longer."""

    engines: tuple[EngineId, ...]
    only_engine: bool = False


@attrs.frozen(kw_only=True)
class Skew(Fault):
    """The engine's clock runs at `speed` (1: right), and jumps ahead by `offset_ns` when the fault begins."""

    engines: tuple[EngineId, ...]
    speed: float = 1.0
    offset_ns: int = 0


@attrs.frozen(kw_only=True)
class TransferError(Fault):
    """Of the WRITEs and READs over these links, this share ends with an error."""

    links: Links
    probability: float = 1.0
    stage: Stage = "in-flight"


@attrs.frozen(kw_only=True)
class HandshakeError(Fault):
    """Of the handshakes over these links, this share fails, `delay_ns` after it began (None: when it would end)."""

    links: Links
    probability: float = 1.0
    delay_ns: int | None = None


@attrs.frozen(kw_only=True)
class HangUp(Fault):
    """Of the requests that are open when the fault begins, this share is given up by its clients; or, with
    `within_ns`, of the requests that come while it lasts, each after a time of its own up to that."""

    probability: float = 1.0
    within_ns: int | None = None


@attrs.frozen(kw_only=True)
class FaultPlan:
    """All of a run's faults. From `heal_ns` on none acts, and every engine is up again."""

    faults: tuple[Fault, ...] = ()
    heal_ns: int | None = None
    transport_timeout_ns: int = 7_000_000_000
    """How long a NIC tries on before an operation fails whose peer does not answer."""
