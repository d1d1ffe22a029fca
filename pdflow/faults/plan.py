"""A resolved plan of faults: engines by name, times in ns. The file format is `pdflow.scenario.schema.faults`.

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
"""The router as the receiver of a link, which carries heartbeats alone."""

Stage: TypeAlias = Literal["start", "in-flight", "landed"]


@attrs.frozen
class Links:
    """Directed links between engines: from any of the first to any of the second, for each pair of groups."""

    directions: tuple[tuple[frozenset[EngineId], frozenset[EngineId]], ...]

    def hold(self, sender: EngineId, receiver: EngineId) -> bool:
        """True if this direction is among the links."""
        return any(sender in senders and receiver in receivers for senders, receivers in self.directions)

    def __bool__(self) -> bool:
        return any(senders and receivers for senders, receivers in self.directions)


@attrs.frozen(kw_only=True)
class FaultTimes:
    """The times at which a fault acts: from `at_ns` on for `for_ns` (None: for good); every `every_ns` again; or, with
    `rate_per_s`, from times on that are drawn, so many a second while it does not act."""

    at_ns: int = 0
    for_ns: int | None = None
    every_ns: int | None = None
    rate_per_s: float | None = None


@attrs.frozen(kw_only=True)
class Fault:
    """Base class of faults. `name` is unique within a plan, and names the fault's stream of random numbers: "drop/0" is
    the first drop."""

    name: str
    when: FaultTimes


@attrs.frozen(kw_only=True)
class MessageFault(Fault):
    """Base class of faults of messages: hits the share `probability` of the messages over these links that are of these
    frames (none named: all)."""

    links: Links
    frames: frozenset[str] = frozenset()
    probability: float = 1.0


@attrs.frozen(kw_only=True)
class DropMessages(MessageFault):
    pass


@attrs.frozen(kw_only=True)
class Delay(MessageFault):
    """Delays messages by `delay_ns`, and up to `jitter_ns` more."""

    delay_ns: int
    jitter_ns: int = 0


@attrs.frozen(kw_only=True)
class Duplicate(MessageFault):
    """Duplicates messages: a copy arrives `delay_ns` behind."""

    delay_ns: int = 0


@attrs.frozen(kw_only=True)
class Reorder(MessageFault):
    """Holds messages back until the next one of the same two ranks has overtaken them, for at most `delay_ns`."""

    delay_ns: int


@attrs.frozen(kw_only=True)
class Partition(Fault):
    """Lets nothing pass over these links."""

    links: Links


@attrs.frozen(kw_only=True)
class Slow(Fault):
    """Divides the bandwidth of these engines' NICs, or of these named links of the network, by `factor`."""

    engines: tuple[EngineId, ...] = ()
    links: tuple[str, ...] = ()
    factor: float


@attrs.frozen(kw_only=True)
class NicDown(Fault):
    """Fails the NIC of this number of each rank of these engines."""

    engines: tuple[EngineId, ...]
    nic: int = 0


@attrs.frozen(kw_only=True)
class Crash(Fault):
    """Kills all processes of an engine, with their memory. `restart_after_ns` None: it does not come back.

    `lands`: operations that its NICs have been given go on; otherwise they are cut off.
    """

    engines: tuple[EngineId, ...]
    restart_after_ns: int | None = None
    new_engine_id: bool = False
    same_incarnation: bool = False
    lands: bool = True


@attrs.frozen(kw_only=True)
class PauseEngine(Fault):
    """Stops the whole process for a while; or, if `only_engine`, makes its running step take that much longer."""

    engines: tuple[EngineId, ...]
    only_engine: bool = False


@attrs.frozen(kw_only=True)
class Skew(Fault):
    """Makes the engine's clock run at `speed` (1: right), and jump ahead by `offset_ns` when the fault begins."""

    engines: tuple[EngineId, ...]
    speed: float = 1.0
    offset_ns: int = 0


@attrs.frozen(kw_only=True)
class TransferError(Fault):
    """Ends this share of the WRITEs and READs over these links with an error."""

    links: Links
    probability: float = 1.0
    stage: Stage = "in-flight"


@attrs.frozen(kw_only=True)
class HandshakeError(Fault):
    """Fails this share of the handshakes over these links, `delay_ns` after they began (None: when they would end)."""

    links: Links
    probability: float = 1.0
    delay_ns: int | None = None


@attrs.frozen(kw_only=True)
class HangUp(Fault):
    """Makes clients give up this share of the requests that are open when the fault begins; or, with `within_ns`, of
    the requests that arrive while it lasts, each after a time of its own up to that."""

    probability: float = 1.0
    within_ns: int | None = None


@attrs.frozen(kw_only=True)
class FaultPlan:
    """All faults of a run. From `heal_ns` on none acts, and every engine is up again."""

    faults: tuple[Fault, ...] = ()
    heal_ns: int | None = None
    transport_timeout_ns: int = 7_000_000_000
    """Time for which a NIC retries before an operation fails whose peer does not answer."""
