"""Engines as endpoints of the explorer: the real core of `pdflow/serving`, and a small engine behind it.

All choice lies in what the engine does next, which is a move: it admits, computes, fails, reports. What a core asks of
the engine is done at once, and answered in the same turn. A body is data; a core is made of it for one event, and the
turn remembers what came of it (world.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from pdflow.protocol.effects import (
    AnswerPrefill,
    Commit,
    Enqueue,
    FreeBlocks,
    ReleaseBlocks,
    Resolve,
    SendLocal,
)
from pdflow.protocol.events import PrefillBegun, PrefillFinished, SourceWithdrawn
from pdflow.protocol.values import Address, Allocation, EngineId, Instant, Value
from pdflow.serving.core import Core, Port
from pdflow.serving.decode import DecodeCore
from pdflow.serving.effects import (
    Admit,
    Computed,
    Drop,
    EndDecode,
    EndPrefill,
    Forget,
    FreePrompt,
    Landed,
    Released,
)
from pdflow.serving.events import EngineAdmitted, EngineDropped, EngineFinished, Handle, PrefillFailed, PromptComputed
from pdflow.serving.landing import Landing
from pdflow.serving.prefill import PrefillCore
from pdflow.serving.sending import Sending
from pdflow_sim.check.scopes.scope import Scope

WEIGHTS = 1
"""Weights of every model."""
QUEUED, LOADING, RUNNING, COMPUTED, BEGUN, UNREPORTED = 1, 2, 3, 4, 5, 6
"""The phases of a sequence in the engine. At P: BEGUN, a part of its prompt is computed; UNREPORTED, all of it is, and
the engine has not said so; COMPUTED, its blocks are the protocol's."""
Seq: TypeAlias = tuple[int, Allocation | None]
"""The phase of a sequence, and the blocks that it has."""


class Admits(Value, frozen=True, gc=False):
    """Event: D's engine gives a request blocks, and has the first tokens of its prompt."""

    handle: Handle
    allocation: Allocation
    hit_tokens: int


class Reports(Value, frozen=True, gc=False):
    """Event: the engine reports that it has admitted, or computed, where it does not do so at once."""

    handle: Handle


class Ends(Value, frozen=True, gc=False):
    """Event: D's engine has generated a request's last token."""

    handle: Handle


class Preempts(Value, frozen=True, gc=False):
    """Event: D's engine takes a request's blocks for others, and computes it anew when it has some again."""

    handle: Handle


class Loads(Value, frozen=True, gc=False):
    """Effect: the engine decodes from what has landed."""

    handle: Handle


class PromptReady(Value, frozen=True, gc=False):
    """Effect: P's core reports to the protocol a prompt that can be sent: `all` of it, or its beginning."""

    handle: Handle
    all: bool


class Withdrawn(Value, frozen=True, gc=False):
    """Effect: P's core has the protocol give up a prompt, whose room is wanted."""

    handle: Handle


class GivenBack(Value, frozen=True, gc=False):
    """Effect: the core gives back blocks that the protocol never knew."""

    allocation: Allocation


class Computes(Value, frozen=True, gc=False):
    """Event: P's engine has computed a prompt."""

    handle: Handle
    source: Allocation


class Fails(Value, frozen=True, gc=False):
    """Event: P's engine gives a prompt up of its own accord."""

    handle: Handle


class SchedulerStub:
    """A stand-in for the scheduler's endpoint: it keeps the events that a core sends, and returns effects passed in."""

    timed = False

    def __init__(self) -> None:
        self.events: list[Any] = []

    def handle(self, event: Any, now: Instant) -> tuple[Any, ...]:
        if isinstance(event, RequestedEffects):
            return (event.effect,)
        self.events.append(event)
        return ()

    def wake_at(self) -> Instant | None:
        return None

    def unfinished(self) -> Mapping[Any, object]:
        return {}


class RequestedEffects:
    """Replaces the event that led an endpoint to this effect."""

    __slots__ = ("effect",)

    def __init__(self, effect: Any) -> None:
        self.effect = effect


class Role:
    """The body of an engine: the requests that its core knows, and its sequences."""

    __slots__ = ("awaited", "dropping", "engine", "requests", "scope", "seqs", "unreported")
    takes: frozenset[type] = frozenset()
    """Effects of the engine's endpoints that its core handles."""

    def __init__(self, engine: EngineId, scope: Scope) -> None:
        self.engine = engine
        self.scope = scope
        self.requests: dict[Handle, Any] = {}
        self.awaited: dict[Handle, None] = {}
        self.dropping: dict[Handle, bool] = {}
        self.seqs: dict[Handle, Seq] = {}
        self.unreported: tuple[tuple[Handle, int], ...] = ()
        """Admissions that the engine has not reported, with the tokens that it has of each."""

    @property
    def cells(self) -> dict[Handle, Any]:
        """Return the tables that must be empty at rest."""
        return {**self.seqs, **self.requests, **self.awaited}

    def leftovers(self) -> dict[str, int]:
        """Return the size of everything that must be empty at rest and is not (L8), by name."""
        sizes = {
            "sequences, requests or room": len(self.cells),
            "sequences that are being dropped": len(self.dropping),
            "admissions to report": len(self.unreported),
        }
        return {name: size for name, size in sizes.items() if size}

    def armed(self) -> tuple[Any, ...]:
        return ()

    def fork(self) -> Role:
        other = type(self)(self.engine, self.scope)
        self.copied_to(other)
        return other

    def copied_to(self, other: Role) -> None:
        """Copy the common part of a fork."""
        other.requests = {handle: request.fork() for handle, request in self.requests.items()}
        other.awaited, other.dropping = self.awaited.copy(), self.dropping.copy()
        other.seqs, other.unreported = self.seqs.copy(), self.unreported

    def fingerprint(self) -> tuple[Any, ...]:
        """Return the state as a value, requests sorted: nothing that a core does depends on their order of arrival."""
        requests = tuple([self.requests[handle].fingerprint() for handle in sorted(self.requests)])
        kept = tuple(sorted(self.awaited)), tuple(sorted(self.dropping.items())), tuple(sorted(self.unreported))
        return requests, *kept, tuple(sorted(self.seqs.items()))

    def handle(self, event: Any, now: Instant) -> tuple[Any, ...]:
        """Handle an event; return the events for the scheduler's endpoint and the other effects. Raises AssertionError
        for what an engine would not accept."""
        stub, emitted = SchedulerStub(), list[Any]()
        port = Port(self.engine, stub, 1)
        core = self.core(port, emitted)
        move = self.moves().get(type(event))
        if move is not None:
            move(core, event)
        elif type(event) in core.rules:
            core.feed(core.role, event, now)
        else:
            core.feed(port, RequestedEffects(event), now)
        self.handled(core)
        events = [self.as_reported(event) for event in stub.events]
        return (*(SendLocal(self.engine, event) for event in events), *emitted, *self.shadow_events(events))

    # What subclasses say.

    def as_reported(self, event: Any) -> Any:
        """Return the event as reported to the protocol, with the names that allocations have in this world."""
        return event

    def shadow_events(self, events: list[Any]) -> list[Any]:
        """Return further effects for the invariant checker, when a handled event has led to these events."""
        return []

    def choices(self) -> tuple[tuple[str, Handle], ...]:
        """Return the moves that the engine may make next, and with which request, where only it knows."""
        return ()

    def core(self, port: Port, emitted: list[Any]) -> Core:
        """Create a core of these requests."""
        raise NotImplementedError

    def moves(self) -> dict[type, Callable[[Any, Any], None]]:
        """Return the handlers of the engine's moves, by event type."""
        raise NotImplementedError

    def handled(self, core: Core) -> None:
        """Keep the state of the core that is in no shared table."""

    # The engine.

    def nothing(self, port: Port, effect: Any) -> None:
        """Ignore an effect that has no meaning in this world."""

    def seq(self, handle: Handle, *where: int) -> Seq:
        found = self.seqs.get(handle)
        assert found is not None, f"the engine has no {handle}"
        assert not where or found[0] in where, f"{handle} is in stage {found[0]} at the engine"
        return found

    def enqueue(self, port: Port, effect: Enqueue) -> None:
        assert effect.request_id not in self.seqs, f"{effect.request_id} is enqueued twice"
        self.seqs[effect.request_id] = (QUEUED, None)


class DecodeRole(Role):
    """The role of a decode engine."""

    __slots__ = ()
    takes = frozenset({Enqueue, Commit, Resolve, FreeBlocks})

    def core(self, port: Port, emitted: list[Any]) -> DecodeCore:
        core = self.decoding(Landing(), port, emitted)
        core.begin(port)
        return core

    def decoding(self, landing: Landing, port: Port, emitted: list[Any]) -> DecodeCore:
        """Create a core with this landing; it has not begun."""
        core = DecodeCore(WEIGHTS, landing)
        core.add(port)
        requests = core.requests
        requests.by_handle, requests.awaited, requests.dropping = self.requests, self.awaited, self.dropping
        core.do |= {Enqueue: self.enqueue, FreeBlocks: self.freed_by_protocol}
        core.perform |= {
            Enqueue: self.enqueue,
            Commit: lambda port, effect: self.loaded(core, emitted, effect),
            Drop: lambda port, effect: self.drop(core, effect),
            FreeBlocks: lambda port, effect: emitted.append(GivenBack(effect.allocation)),
            EndDecode: lambda port, effect: emitted.append(effect),
            Admit: self.nothing,
            Landed: self.nothing,
        }
        return core

    def moves(self) -> dict[type, Callable[[Any, Any], None]]:
        return {
            Admits: self.admits,
            Reports: self.reports,
            Ends: self.ends,
            Preempts: self.preempts,
        }

    def admits(self, core: Core, move: Admits) -> None:
        self.seq(move.handle, QUEUED)
        self.seqs[move.handle] = (LOADING, move.allocation)
        self.unreported += ((move.handle, move.hit_tokens),)
        if not self.scope.late:
            self.reports(core, Reports(move.handle))

    def reports(self, core: Core, move: Reports) -> None:
        """Report an admission to the core. The request may have been dropped meanwhile."""
        (hit_tokens,) = (here for handle, here in self.unreported if handle == move.handle)
        self.unreported = tuple(one for one in self.unreported if one[0] != move.handle)
        allocation = self.seq(move.handle, LOADING)[1]
        assert allocation is not None
        core.feed(core.role, EngineAdmitted(move.handle, allocation, hit_tokens), 0)

    def loaded(self, core: Core, emitted: list[Any], effect: Commit) -> None:
        emitted.append(Loads(effect.request_id))
        _, allocation = self.seq(effect.request_id, LOADING)
        self.seqs[effect.request_id] = (RUNNING, allocation)
        if not self.scope.decodes:
            self.ends(core, Ends(effect.request_id))

    def ends(self, core: Core, move: Ends) -> None:
        self.seq(move.handle, RUNNING)
        del self.seqs[move.handle]
        core.feed(core.role, EngineFinished(move.handle), 0)

    def preempts(self, core: Core, move: Preempts) -> None:
        self.seq(move.handle, RUNNING)
        self.seqs[move.handle] = (RUNNING, None)

    def drop(self, core: Core, effect: Drop) -> None:
        """Drop a request. Blocks of one that is loading are left to the protocol, since a WRITE may still land."""
        phase, allocation = self.seqs.pop(effect.handle, (0, None))
        self.unreported = tuple(one for one in self.unreported if one[0] != effect.handle)
        left = allocation if phase == LOADING else None
        core.feed(core.role, EngineDropped(effect.handle, left, not phase), 0)

    def freed_by_protocol(self, port: Port, effect: FreeBlocks) -> None:
        """Check that the engine no longer has the blocks that go back to the pool."""
        held = [handle for handle, (_, allocation) in self.seqs.items() if allocation == effect.allocation]
        assert not held, f"blocks of {held} are released while the engine holds it"


class PrefillRole(Role):
    """The role of a prefill engine."""

    __slots__ = ()
    takes = frozenset({AnswerPrefill, ReleaseBlocks})
    unfinished: tuple[int, ...] = (QUEUED,)
    """Phases of a sequence of which something is still to be computed."""

    def core(self, port: Port, emitted: list[Any]) -> PrefillCore:
        core = self.prefilling(Sending(), port, emitted)
        core.begin(port)
        return core

    def prefilling(self, sending: Sending, port: Port, emitted: list[Any]) -> PrefillCore:
        """Create a core with this sending; it has not begun."""
        core = PrefillCore(WEIGHTS, sending)
        core.add(port)
        core.requests.by_handle, core.requests.awaited = self.requests, self.awaited
        core.perform |= {
            Enqueue: self.enqueue,
            Drop: lambda port, effect: self.drop(core, effect),
            FreePrompt: lambda port, effect: self.free(emitted, effect),
            EndPrefill: lambda port, effect: emitted.append(effect),
            AnswerPrefill: self.nothing,
            Computed: self.nothing,
            Released: self.nothing,
            Forget: self.nothing,
        }
        return core

    def moves(self) -> dict[type, Callable[[Any, Any], None]]:
        return {Computes: self.computes, Reports: self.reports, Fails: self.fails}

    def computes(self, core: Core, move: Computes) -> None:
        self.seq(move.handle, *self.unfinished)
        self.seqs[move.handle] = (UNREPORTED, move.source)
        if not self.scope.late:
            self.reports(core, Reports(move.handle))

    def reports(self, core: Core, move: Reports) -> None:
        source = self.seq(move.handle, UNREPORTED)[1]
        assert source is not None
        self.seqs[move.handle] = (COMPUTED, source)
        core.feed(core.role, PromptComputed(move.handle, source), 0)

    def fails(self, core: Core, move: Fails) -> None:
        self.seq(move.handle, *self.unfinished)
        del self.seqs[move.handle]
        core.feed(core.role, PrefillFailed(move.handle), 0)

    def shadow_events(self, events: list[Any]) -> list[Any]:
        emitted: list[Any] = []
        for event in events:
            if isinstance(event, (PrefillBegun, PrefillFinished)):
                emitted.append(PromptReady(event.xid, isinstance(event, PrefillFinished)))
            elif isinstance(event, SourceWithdrawn):
                emitted.append(Withdrawn(event.xid))
        return emitted

    def drop(self, core: Core, effect: Drop) -> None:
        phase, _ = self.seqs.get(effect.handle, (0, None))
        too_late = phase not in self.unfinished
        if not too_late:
            del self.seqs[effect.handle]
        core.feed(core.role, EngineDropped(effect.handle, None, too_late), 0)

    def free(self, emitted: list[Any], effect: FreePrompt) -> None:
        emitted.append(effect)
        self.seq(effect.handle, COMPUTED)
        del self.seqs[effect.handle]


def address_of(engine: EngineId) -> Address:
    """Return the address of an engine's role among the explorer's nodes."""
    return f"{engine}.role"
