"""D's engine where KV lands in staging memory: the real strategy of `pdflow/serving`, and a small engine that admits
what has landed, and copies it into blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from pdflow.methods.staging import Staging
from pdflow.protocol.effects import FreeBlocks, Quarantine
from pdflow.protocol.events import DecodeAdmitted
from pdflow.protocol.values import Allocation, EngineId
from pdflow.serving.core import Core, Port
from pdflow.serving.decode import DecodeCore
from pdflow.serving.effects import AskForRoom, CopyIn, GiveBackRoom, TakeRoom
from pdflow.serving.events import CopiedIn, Handle, RoomDue
from pdflow.serving.landing import StagedLanding
from pdflow_sim.check.engines.plan import Copied, EnginePlan, WaitsForRoom, as_it_is, holder, kept
from pdflow_sim.check.engines.roles import LOADING, QUEUED, RUNNING, DecodeRole

BLOCKS = 1000
"""First generation of the blocks that the engine gives to requests that have landed."""


class StagedDecodeRole(DecodeRole):
    """The role of a decode engine whose KV lands in staging memory."""

    __slots__ = ("abandoned", "asked", "copies", "copying", "plan", "staging")
    takes = DecodeRole.takes | {Quarantine}

    def __init__(self, engine: EngineId, plan: EnginePlan, staging: Staging) -> None:
        super().__init__(engine, plan.scope)
        self.plan = plan
        self.staging = staging
        self.copying: dict[Handle, Allocation] = {}
        self.abandoned: dict[Handle, Allocation] = {}
        self.asked = False
        self.copies: tuple[tuple[Handle, Allocation], ...] = ()
        """Copies under way: the request, and the blocks."""

    @property
    def cells(self) -> dict[Handle, Any]:
        return {**super().cells, **self.copying, **self.abandoned, **kept(self.staging), **dict(self.copies)}

    def fork(self) -> StagedDecodeRole:
        other = StagedDecodeRole(self.engine, self.plan, self.staging.fork())
        self.copied_to(other)
        other.copying, other.abandoned = self.copying.copy(), self.abandoned.copy()
        other.asked, other.copies = self.asked, self.copies
        return other

    def fingerprint(self) -> tuple[Any, ...]:
        copying, abandoned = tuple(sorted(self.copying.items())), tuple(sorted(self.abandoned.items()))
        return (*super().fingerprint(), as_it_is(self.staging), copying, abandoned, self.asked, self.copies)

    def core(self, port: Port, emitted: list[Any]) -> DecodeCore:
        landing = StagedLanding(self.staging)
        landing.copying, landing.abandoned, landing.asked = self.copying, self.abandoned, self.asked
        names = {generation: name for generation, (name, _) in self.staging.held.items()}

        def take(_: Port, effect: TakeRoom) -> None:
            names[effect.staged.generation] = effect.handle
            emitted.append(effect)

        def give_back(_: Port, effect: GiveBackRoom) -> None:
            emitted.append(GiveBackRoom(self.plan.staged[names[effect.staged.generation]]))

        core = self.decoding(landing, port, emitted)
        core.do[Quarantine] = self.nothing
        core.perform |= {
            AskForRoom: self.nothing,
            TakeRoom: take,
            GiveBackRoom: give_back,
            CopyIn: lambda port, effect: self.copy_in(core, effect),
            FreeBlocks: self.free_copied,
        }
        core.begin(port)
        return core

    def handle(self, event: Any, now: int) -> tuple[Any, ...]:
        """Handle an event, with room that the protocol gives back under the name that the memory gave it."""
        if isinstance(event, (FreeBlocks, Quarantine)):
            names = {staged: handle for handle, staged in self.plan.staged.items()}
            handle = names[event.allocation]
            held = [(number, extents) for number, (name, extents) in self.staging.held.items() if name == handle]
            assert held, f"the staging memory of {handle} is released twice"
            event = msgspec.structs.replace(event, allocation=Allocation(*held[0]))
        return super().handle(event, now)

    def handled(self, core: Core) -> None:
        assert isinstance(core, DecodeCore)
        assert isinstance(core.landing, StagedLanding)
        self.asked = core.landing.asked

    def as_reported(self, event: Any) -> Any:
        if not isinstance(event, DecodeAdmitted):
            return event
        assert holder(self.staging, event.allocation) == event.request_id, (
            f"{event.request_id} has no staging memory there"
        )
        return msgspec.structs.replace(event, allocation=self.plan.staged[event.request_id])

    def shadow_events(self, events: list[Any]) -> list[Any]:
        return [WaitsForRoom()] if self.staging.waiting and not self.asked else []

    # The engine.

    def choices(self) -> tuple[tuple[str, Handle], ...]:
        found: list[tuple[str, Handle]] = [("room", self.engine)] * self.asked
        unreported = [handle for handle, _ in self.unreported]
        for handle, (phase, blocks) in sorted(self.seqs.items()):
            if phase == QUEUED:
                found.append(("load", handle))
            elif phase == LOADING and handle in unreported:
                found.append(("report", handle))
            elif phase == RUNNING:
                found.append(("end", handle))
                if blocks is not None:
                    found.append(("preempt", handle))
        return (*found, *(("copied", handle) for handle, _ in self.copies))

    def moves(self) -> dict[type, Callable[[Any, Any], None]]:
        return super().moves() | {Copied: self.copied, RoomDue: self.room}

    def room(self, core: Core, event: RoomDue) -> None:
        core.feed(core.role, event, 0)

    # Copies.

    def copy_in(self, core: Core, effect: CopyIn) -> None:
        self.copies += ((effect.handle, effect.allocation),)
        if not self.scope.late:
            self.copied(core, Copied(effect.handle))

    def copied(self, core: Core, move: Copied) -> None:
        self.copies = tuple(one for one in self.copies if one[0] != move.handle)
        core.feed(core.role, CopiedIn(move.handle), 0)

    def free_copied(self, port: Port, effect: FreeBlocks) -> None:
        """Check that no sequence has the freed blocks and that no copy into them is under way."""
        copied_into = [handle for handle, blocks in self.copies if blocks == effect.allocation]
        assert not copied_into, f"blocks are freed while {copied_into} is being copied into them"
        self.freed_by_protocol(port, effect)
