"""P's engine where a prompt is sent before all of it is computed, or by way of staging memory: the real strategies of
`pdflow/serving`, and a small engine that computes in steps.

Its body gives what it may do next (`choices`): which prompt it begins or ends, unless its core has it stand still;
whose copies have ended, where those take time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from pdflow.methods.method import Grain
from pdflow.methods.staging import Staging
from pdflow.protocol.effects import PostWrite
from pdflow.protocol.events import PrefillBegun, PrefillFinished
from pdflow.protocol.values import Allocation, EngineId, Value
from pdflow.serving.core import Core, Port
from pdflow.serving.effects import (
    CopyOut,
    Drop,
    FreePrompt,
    HoldEngine,
    LeaveRoom,
    OfferPiece,
    ResumeEngine,
    TakeRoom,
    WithdrawPieces,
)
from pdflow.serving.events import ChunkStarted, CopiedOut, Handle, LayerReady, PrefillFailed
from pdflow.serving.prefill import PrefillCore
from pdflow.serving.sending import ProgressiveSending, RunningSteps, Sending
from pdflow.serving.staged_sending import StagedSend, StagedSending
from pdflow_sim.check.engines.plan import Copied, EnginePlan, WaitsForRoom, as_it_is, holder, kept
from pdflow_sim.check.engines.roles import BEGUN, COMPUTED, QUEUED, UNREPORTED, Fails, PrefillRole
from pdflow_sim.check.scopes.scope import TOKENS
from pdflow_sim.check.state.shadow_state import Broken


class Chunk(Value, frozen=True, gc=False):
    """Event: P's engine begins a step that computes a prompt up to this token."""

    handle: Handle
    source: Allocation
    known: int


class LayerOutcome(Value, frozen=True, gc=False):
    """Event: the step that computes a prompt up to this token has computed this layer."""

    handle: Handle
    known: int
    layer: int


def step_of(handle: Handle, known: int) -> int:
    """Return the number of a step. Each prompt has steps of its own, numbered after the number in its name."""
    return int(handle[1:]) * 100 + known


class LayeredPrefillRole(PrefillRole):
    """The role of a P that sends prompts before they are computed in full, or from staging memory (`staging`)."""

    __slots__ = ("copies", "outgoing", "plan", "staging", "steps")
    takes = PrefillRole.takes | {PostWrite}
    unfinished = (QUEUED, BEGUN)

    def __init__(self, engine: EngineId, plan: EnginePlan, staging: Staging | None) -> None:
        super().__init__(engine, plan.scope)
        self.plan = plan
        self.staging = staging
        self.steps = RunningSteps(plan.layers)
        self.outgoing: dict[Handle, StagedSend] = {}
        self.copies: tuple[CopiedOut, ...] = ()
        """Events that the copies under way will end with."""

    @property
    def cells(self) -> dict[Handle, Any]:
        return {**super().cells, **self.outgoing, **kept(self.staging), **{one.handle: one for one in self.copies}}

    def leftovers(self) -> dict[str, int]:
        left = super().leftovers()
        return {**left, "steps that run": len(self.steps.chunks)} if self.steps.chunks else left

    def fork(self) -> LayeredPrefillRole:
        other = LayeredPrefillRole(self.engine, self.plan, None if self.staging is None else self.staging.fork())
        self.copied_to(other)
        other.copies = self.copies
        other.steps.chunks = {step: chunks.copy() for step, chunks in self.steps.chunks.items()}
        other.steps.ready = self.steps.ready.copy()
        for handle, going in self.outgoing.items():
            other.outgoing[handle] = going.fork(other.requests[handle])
        return other

    def fingerprint(self) -> tuple[Any, ...]:
        outgoing = tuple((handle, *self.outgoing[handle].state()) for handle in sorted(self.outgoing))
        copies = tuple(msgspec.structs.astuple(one) for one in self.copies)
        return (*super().fingerprint(), as_it_is(self.staging), self.steps.fingerprint(), outgoing, copies)

    def core(self, port: Port, emitted: list[Any]) -> PrefillCore:
        core = self.prefilling(self.sending(), port, emitted)
        core.do[PostWrite] = self.nothing
        core.perform |= {
            CopyOut: lambda port, effect: self.copy_out(core, effect),
            LeaveRoom: lambda port, effect: emitted.append(effect),
            OfferPiece: lambda port, effect: self.offer(emitted, effect),
            WithdrawPieces: lambda port, effect: emitted.append(effect),
            HoldEngine: self.nothing,
            ResumeEngine: self.nothing,
            TakeRoom: self.nothing,
        }
        core.begin(port)
        return core

    def sending(self) -> Sending:
        plan = self.plan
        if self.staging is None:
            progressive = ProgressiveSending(plan.layers)
            progressive.steps = self.steps
            return progressive
        ranks = plan.ranks
        staged = StagedSending(plan.method, plan.pipeline_policy, self.staging, plan.layers, ranks, ranks)
        staged.steps, staged.outgoing = self.steps, self.outgoing
        return staged

    def as_reported(self, event: Any) -> Any:
        """Return the event with the protocol's name of the prompt's memory. Where D reads, that must be its room."""
        if not isinstance(event, (PrefillBegun, PrefillFinished)):
            return event
        staged = self.plan.staged[event.xid]
        if self.staging is not None and self.plan.method.pulls:
            assert holder(self.staging, event.allocation) == event.xid, (
                f"{event.xid} is not at the reported place in staging memory"
            )
        else:
            assert event.allocation == staged, f"{event.xid} is in other blocks"
        return msgspec.structs.replace(event, allocation=staged)

    def shadow_events(self, events: list[Any]) -> list[Any]:
        emitted = super().shadow_events(events)
        return [*emitted, WaitsForRoom()] if self.staging is not None and self.staging.waiting else emitted

    # The engine.

    def choices(self) -> tuple[tuple[str, Handle], ...]:
        """Return the possible moves of the engine. A step that has begun goes on, whatever the engine waits for."""
        found: list[tuple[str, Handle]] = []
        by_chunk = self.plan.method.grain is Grain.LAYER_CHUNK
        for handle, (phase, _) in sorted(self.seqs.items()):
            starts = phase == QUEUED or (phase == BEGUN and by_chunk)
            if phase in (QUEUED, BEGUN, UNREPORTED) and not (starts and self.awaited):
                if phase == QUEUED and self.plan.pipeline_policy.early:
                    found.append(("begin", handle))
                found.append(("finish", handle))
            if phase in self.unfinished:
                found.append(("abort prefill", handle))
            if self.scope.late and phase in (QUEUED, BEGUN, UNREPORTED):
                found.append(("cancel prefill", handle))
        found += [("copied", handle) for handle in dict.fromkeys(one.handle for one in self.copies)]
        return tuple(found)

    def moves(self) -> dict[type, Callable[[Any, Any], None]]:
        return super().moves() | {Chunk: self.chunk, LayerOutcome: self.layer, Copied: self.copied}

    def chunk(self, core: Core, move: Chunk) -> None:
        self.seq(move.handle, *self.unfinished)
        self.seqs[move.handle] = (BEGUN, move.source)
        step = step_of(move.handle, move.known)
        core.feed(core.role, ChunkStarted(move.handle, move.source, move.known, step), 0)

    def layer(self, core: Core, move: LayerOutcome) -> None:
        core.feed(core.role, LayerReady(step_of(move.handle, move.known), move.layer), 0)

    def fails(self, core: Core, move: Fails) -> None:
        """Give up a prompt. If the protocol may be sending it from its blocks, it stays in them."""
        phase, source = self.seq(move.handle, *self.unfinished)
        if phase == BEGUN and self.staging is None:
            self.seqs[move.handle] = (COMPUTED, source)
            core.feed(core.role, PrefillFailed(move.handle), 0)
        else:
            super().fails(core, move)
        self.run_out(core, move.handle)

    def drop(self, core: Core, effect: Drop) -> None:
        super().drop(core, effect)
        self.run_out(core, effect.handle)

    def run_out(self, core: Core, handle: Handle) -> None:
        """Let the steps of a prompt that have begun go on without it."""
        for step in [step for step in self.steps.chunks if step // 100 == step_of(handle, 0) // 100]:
            for layer in range(self.steps.ready[step], self.plan.layers):
                core.feed(core.role, LayerReady(step, layer), 0)

    def free(self, emitted: list[Any], effect: FreePrompt) -> None:
        assert not any(one.handle == effect.handle for one in self.copies), f"{effect.handle} is freed under a copy"
        super().free(emitted, effect)

    def offer(self, emitted: list[Any], effect: OfferPiece) -> None:
        """Pass a piece on. The engine must still have its prompt, so its blocks have not been given to another."""
        self.seq(effect.handle)
        piece = effect.piece
        if not (0 <= piece.layer < self.plan.layers and 0 <= piece.start < piece.stop <= TOKENS):
            raise Broken("S4", f"{effect.handle} has no {piece}")
        emitted.append(effect)

    # Copies.

    def copy_out(self, core: Core, effect: CopyOut) -> None:
        self.seq(effect.handle)
        ended = tuple(CopiedOut(effect.handle, effect.piece, rank) for rank in range(self.plan.ranks))
        if self.scope.late:
            self.copies += ended
            return
        for one in ended:
            core.feed(core.role, one, 0)

    def copied(self, core: Core, move: Copied) -> None:
        one = next(one for one in self.copies if one.handle == move.handle)
        at = self.copies.index(one)
        self.copies = self.copies[:at] + self.copies[at + 1 :]
        core.feed(core.role, one, 0)
