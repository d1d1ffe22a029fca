"""Prompts leave P's blocks once, whole, and before these are given back: whoever copies, at once or later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdflow.methods.catalogue import METHODS
from pdflow.methods.staging import KvSize, PagedStaging
from pdflow.protocol.effects import AnswerPrefill, Enqueue, PostWrite, ReleaseBlocks
from pdflow.protocol.events import PrefillAborted, PrefillBegun, PrefillFinished, PrefillQueued, SourceWithdrawn
from pdflow.protocol.ids import EngineInfo, KvParams, Op, Reg, Shards
from pdflow.protocol.messages import Code, Done, Register
from pdflow.protocol.values import Allocation, Instant, Xid
from pdflow.serving.core import Port
from pdflow.serving.effects import (
    Computed,
    CopyOut,
    Drop,
    EndPrefill,
    Forget,
    FreePrompt,
    HoldEngine,
    LeaveRoom,
    OfferPiece,
    Released,
    ResumeEngine,
    TakeRoom,
    WithdrawPieces,
)
from pdflow.serving.events import (
    ChunkStarted,
    CopiedOut,
    EngineDropped,
    LayerReady,
    PrefillRequested,
    PromptComputed,
    RequestAborted,
)
from pdflow.serving.prefill import PrefillCore
from pdflow.serving.staged_sending import StagedSending

LAYERS = 2
STAGED = ("cpu-staged", "p2p-nccl-put", "p2p-nccl-put-async", "p2p-nccl-get", "mooncake-v0")
INFO = EngineInfo("p", Shards(1, 1, 4))


class Prompt:
    """What the test knows of one."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.known = 0
        self.in_blocks = True
        self.begun = self.finished = self.posted = self.withdrawn = self.released = False
        self.ended = False
        """The engine has dropped it, and its blocks are the engine's."""
        self.there: set[tuple[int, int]] = set()
        """Layers of tokens that are where they are sent from."""


class Protocol:
    """The scheduler's endpoint: it answers what is finished, and wants what the test says next."""

    timed = False

    def __init__(self, prompts: dict[Xid, Prompt], pulls: bool) -> None:
        self.prompts = prompts
        self.pulls = pulls
        self.next: list[Any] = []

    def handle(self, event: Any, now: Instant) -> tuple[Any, ...]:
        if isinstance(event, PrefillBegun):
            prompt = self.prompts[event.xid]
            assert not prompt.begun
            prompt.begun = True
        elif isinstance(event, PrefillFinished):
            return self.finished(event)
        elif isinstance(event, SourceWithdrawn):
            self.prompts[event.xid].withdrawn = True
        elif not isinstance(event, PrefillQueued | PrefillAborted):
            effects, self.next = tuple(self.next), []
            return effects
        return ()

    def finished(self, event: PrefillFinished) -> tuple[Any, ...]:
        prompt = self.prompts[event.xid]
        assert not prompt.finished
        assert prompt.known == prompt.tokens
        if self.pulls and not prompt.released:
            assert len(prompt.there) == LAYERS * prompt.tokens, "D may read it from now on"
        prompt.finished = True
        return (AnswerPrefill(event.xid, KvParams(INFO, event.xid, event.xid, prompt.tokens)),)

    def wake_at(self) -> None:
        return None


class World(RuleBasedStateMachine):
    """The engine and the protocol, as far as they matter here: what is posted ends some time, and is released."""

    @initialize(name=st.sampled_from(STAGED), at_once=st.booleans(), published=st.booleans())
    def build(self, name: str, at_once: bool, published: bool) -> None:
        self.method = METHODS[name]
        self.pipeline_policy = self.method.published if published else self.method.strict
        self.at_once = at_once
        self.prompts: dict[Xid, Prompt] = {}
        self.gone: dict[Xid, Prompt] = {}
        self.copies: list[tuple[Prompt, CopyOut]] = []
        self.staged: dict[Xid, Allocation] = {}
        self.held = False
        self.count = self.steps = 0
        self.running: tuple[Xid, int, int] | None = None
        """The step that runs: whose, up to which token, and which layer is next."""
        staging = PagedStaging(KvSize(LAYERS, 1), 4, 8, evicts=name == "p2p-nccl-get")
        sending = StagedSending(self.method, self.pipeline_policy, staging, LAYERS, 1, 1)
        self.staging, self.core = staging, PrefillCore(1, sending)
        self.protocol = Protocol(self.prompts, self.method.pulls)
        self.port = Port("p", self.protocol, 1)
        self.core.add(self.port)
        self.core.do[PostWrite] = lambda port, effect: None
        does: dict[type, Callable[[Any], None]] = {
            CopyOut: self.copy_out,
            FreePrompt: self.free,
            Forget: self.forget,
            TakeRoom: self.take_room,
            LeaveRoom: self.leave_room,
            Drop: self.drop,
            HoldEngine: self.hold,
            ResumeEngine: self.resume,
        }
        for kind in (Enqueue, Computed, Released, EndPrefill, AnswerPrefill, OfferPiece, WithdrawPieces):
            does[kind] = lambda effect: None
        for kind, do in does.items():
            self.core.perform[kind] = lambda port, effect, do=do: do(effect)
        self.core.begin(self.port)

    def role(self, event: Any) -> None:
        self.core.feed(self.core.role, event, 0)

    def emit(self, effect: Any) -> None:
        self.protocol.next = [effect]
        self.core.feed(self.port, "something", 0)

    # What happens.

    @rule(tokens=st.integers(1, 20))
    def arrives(self, tokens: int) -> None:
        self.arrive(tokens)

    def arrive(self, tokens: int) -> Xid:
        self.count += 1
        xid = f"x{self.count}"
        self.prompts[xid] = Prompt(tokens)
        self.role(PrefillRequested(xid, xid, tokens, 0))
        return xid

    def some(self, data: st.DataObject, which: Any) -> Xid | None:
        found = [xid for xid, prompt in self.prompts.items() if which(prompt)]
        return data.draw(st.sampled_from(found)) if found else None

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """The engine begins to compute a part of a prompt; what is early leaves layer by layer."""
        xid = self.some(data, lambda prompt: prompt.known < prompt.tokens and not prompt.ended)
        if xid is not None and self.running is None:
            self.begin(xid, data.draw(st.integers(self.prompts[xid].known + 1, self.prompts[xid].tokens)))

    def begin(self, xid: Xid, known: int) -> None:
        self.steps += 1
        self.running = (xid, known, 0)
        if self.pipeline_policy.early:
            self.role(ChunkStarted(xid, self.source(xid), known, self.steps))

    def source(self, xid: Xid) -> Allocation:
        return Allocation(int(xid[1:]), ())

    @precondition(lambda self: self.running is not None)
    @rule()
    def layer(self) -> None:
        """Of a prompt that was given up meanwhile, too."""
        assert self.running is not None
        xid, known, layer = self.running
        if self.pipeline_policy.early:
            self.role(LayerReady(self.steps, layer))
        self.running = (xid, known, layer + 1) if layer + 1 < LAYERS else None
        prompt = self.prompts.get(xid)
        if self.running is None and prompt is not None and not prompt.ended:
            prompt.known = known
            if known == prompt.tokens:
                self.role(PromptComputed(xid, self.source(xid)))

    def compute(self, xid: Xid, known: int) -> None:
        """All layers of a step."""
        self.begin(xid, known)
        while self.running is not None:
            self.layer()

    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        """The protocol posts a WRITE of what it holds, or D reads it."""
        xid = self.some(data, lambda prompt: self.is_held(prompt) and not prompt.posted)
        if xid is not None:
            self.post(xid)

    def post(self, xid: Xid) -> None:
        self.prompts[xid].posted = True
        if not self.method.pulls:
            reg = Reg("d", 1, 1, xid)
            registration = Register(reg, xid, 0, INFO.shards, Allocation(1, ()), 0, self.prompts[xid].tokens, 0, 1, 0)
            self.emit(PostWrite(Op(reg, 0, 0), "d.r0", Allocation(1, ()), registration, 0, Done(reg, 0, 1, 0, 1)))

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """What was posted has ended, all of it having gone; the protocol releases it."""
        xid = self.some(data, lambda prompt: prompt.posted and self.has_gone(prompt) and not prompt.released)
        if xid is not None:
            self.release(xid)

    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        """The protocol releases a prompt wherever it is: it may wait for room, or be computed still."""
        xid = self.some(data, self.is_held)
        if xid is not None:
            self.release(xid)

    def is_held(self, prompt: Prompt) -> bool:
        return (prompt.begun or prompt.finished) and not prompt.released

    def release(self, xid: Xid) -> None:
        self.prompts[xid].released = True
        self.emit(ReleaseBlocks(xid, Allocation(1, ()), Code.NONE))

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """What the protocol holds of it is released later."""
        xid = self.some(data, lambda prompt: not prompt.ended)
        if xid is not None:
            self.role(RequestAborted(xid))

    @precondition(lambda self: self.copies)
    @rule(data=st.data())
    def copy(self, data: st.DataObject) -> None:
        self.copied(*self.copies.pop(data.draw(st.integers(0, len(self.copies) - 1))))

    def copied(self, prompt: Prompt, effect: CopyOut) -> None:
        assert prompt.in_blocks or prompt.ended, "its blocks were somebody else's"
        if effect.handle in self.staged:
            piece = effect.piece
            layers = range(LAYERS) if piece is None else (piece.layer,)
            first, last = (0, prompt.tokens) if piece is None else (piece.start, piece.stop)
            cells = {(layer, token) for layer in layers for token in range(first, last)}
            assert not cells & prompt.there
            prompt.there |= cells
        self.role(CopiedOut(effect.handle, effect.piece, 0))

    @rule()
    def evict(self) -> None:
        """Nobody reads it, so the protocol releases what is withdrawn; but in a turn of its own."""
        for xid, prompt in tuple(self.prompts.items()):
            if prompt.withdrawn and prompt.finished and not prompt.released:
                self.release(xid)

    # What the core wants.

    def copy_out(self, effect: CopyOut) -> None:
        prompt = self.prompts[effect.handle]
        assert prompt.in_blocks
        if self.at_once:
            self.copied(prompt, effect)
        else:
            self.copies.append((prompt, effect))

    def free(self, effect: FreePrompt) -> None:
        assert self.prompts[effect.handle].in_blocks
        self.prompts[effect.handle].in_blocks = False

    def drop(self, effect: Drop) -> None:
        prompt = self.prompts[effect.handle]
        assert prompt.known < prompt.tokens
        prompt.in_blocks, prompt.ended = False, True
        self.role(EngineDropped(effect.handle))

    def forget(self, effect: Forget) -> None:
        assert not self.prompts[effect.handle].in_blocks
        del self.prompts[effect.handle]

    def take_room(self, effect: TakeRoom) -> None:
        self.staged[effect.handle] = effect.staged

    def leave_room(self, effect: LeaveRoom) -> None:
        del self.staged[effect.handle]

    def hold(self, effect: HoldEngine) -> None:
        assert not self.held
        self.held = True

    def resume(self, effect: ResumeEngine) -> None:
        assert self.held
        self.held = False

    # What holds all the time.

    @invariant()
    def nobody_waits_for_room_who_is_not_on_its_way(self) -> None:
        if hasattr(self, "core"):
            outgoing = self.core.sending.outgoing  # type: ignore[attr-defined]
            assert set(self.staging.waiting) <= set(outgoing)
            assert not any(outgoing[xid].over for xid in self.staging.waiting)

    @invariant()
    def what_has_left_is_where_it_is_sent_from(self) -> None:
        for prompt in getattr(self, "prompts", {}).values():
            if not prompt.in_blocks and not prompt.released and not prompt.ended:
                assert self.has_all(prompt)

    def has_all(self, prompt: Prompt) -> bool:
        return len(prompt.there) == LAYERS * prompt.tokens

    def has_gone(self, prompt: Prompt) -> bool:
        return prompt.finished and (self.method.pulls or self.has_all(prompt))

    def teardown(self) -> None:
        """Everything goes on, and ends."""
        if not hasattr(self, "prompts"):
            return
        for _ in range(4 * len(self.prompts) + 4):
            while self.running is not None:
                self.layer()
            while self.copies:
                self.copied(*self.copies.pop())
            for xid, prompt in tuple(self.prompts.items()):
                self.go_on(xid, prompt)
        assert not self.prompts
        assert not self.held
        assert not self.staged
        self.core.assert_empty("P")

    def go_on(self, xid: Xid, prompt: Prompt) -> None:
        if prompt.ended:
            if self.is_held(prompt):
                self.release(xid)
        elif prompt.known < prompt.tokens:
            self.compute(xid, prompt.tokens)
        elif self.is_held(prompt) and not prompt.posted:
            self.post(xid)
        elif prompt.posted and not prompt.released and self.has_gone(prompt):
            self.release(xid)


TestStagedSending = World.TestCase
TestStagedSending.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def world_of(name: str, at_once: bool = True, published: bool = False) -> World:
    world = World()
    world.build(name, at_once, published)
    return world


def test_two_chunks_that_waited_for_room_are_both_copied_before_the_blocks_are_free() -> None:
    """Found by a live engine, which copies at once: behind the first chunk the blocks were given back."""
    world = world_of("cpu-staged")
    xid = world.arrive(8)
    prompt = world.prompts[xid]
    world.compute(xid, 4)
    world.compute(xid, 8)
    world.post(xid)
    assert len(prompt.there) == LAYERS * 8
    assert not prompt.in_blocks


@pytest.mark.parametrize("tokens", [29, 32], ids=["partial tail", "exact fit"])
@pytest.mark.parametrize("name", ["cpu-staged", "p2p-nccl-put", "p2p-nccl-put-async"])
def test_a_put_that_is_given_up_while_it_waits_for_room_is_over_once(name: str, tokens: int) -> None:
    """Behind one that fills the memory: what comes free goes to the next one. It was forgotten twice."""
    world = world_of(name)
    first, given_up, then = (world.arrive(its) for its in (tokens, 4, 4))
    for xid in (first, given_up, then):
        world.compute(xid, world.prompts[xid].tokens)
        world.post(xid)
    assert list(world.staged) == [first], "it fills the memory"
    assert list(world.staging.waiting) == [given_up, then]
    world.release(given_up)
    assert set(world.prompts) == {first, then}
    world.release(first)
    assert list(world.staged) == [then]
    world.teardown()


def test_a_prefill_that_is_taken_back_while_its_put_waits_for_room_leaves_the_queue() -> None:
    """It was announced and is to be written while it is computed; what comes free then is none of its own."""
    world = world_of("cpu-staged")
    first, taken_back = world.arrive(32), world.arrive(8)
    world.compute(first, 32)
    world.compute(taken_back, 4)
    world.post(first)
    world.post(taken_back)
    assert list(world.staging.waiting) == [taken_back]
    world.role(RequestAborted(taken_back))
    world.release(first)
    assert not world.staged, "it has no room, and gets none"
    world.teardown()


def test_of_a_prompt_that_is_given_up_in_the_middle_of_a_step_nothing_more_is_copied() -> None:
    """Found by `pdflow check`: its blocks are others' by then, while its room is still the WRITE's."""
    world = world_of("p2p-nccl-put-async")
    xid = world.arrive(8)
    world.begin(xid, 8)
    world.post(xid)
    world.layer()
    assert len(world.prompts[xid].there) == 8
    world.role(RequestAborted(xid))
    while world.running is not None:
        world.layer()
    assert len(world.prompts[xid].there) == 8
    world.release(xid)
    world.teardown()


@pytest.mark.parametrize("name", STAGED)
def test_what_ends_early_leaves_nothing(name: str) -> None:
    world = world_of(name)
    xid = world.arrive(8)
    world.compute(xid, 4)
    begun = world.prompts[xid].begun
    world.role(RequestAborted(xid))
    if begun:
        world.release(xid)
    assert not world.prompts
    world.core.assert_empty("P")


def test_a_prompt_that_gets_room_when_it_is_computed_is_finished_before_it_is_copied() -> None:
    """As published, a prompt asks for room before its WRITE does."""
    world = world_of("cpu-staged", at_once=False, published=True)
    first, then = world.arrive(32), world.arrive(8)
    world.compute(first, 32)
    world.compute(then, 8)
    assert list(world.staging.waiting) == [then]
    assert not world.prompts[then].finished
    world.post(first)
    world.release(first)
    assert world.prompts[then].finished
    assert [effect.handle for _, effect in world.copies if effect.handle == then]
    world.teardown()


def test_the_engine_waits_for_no_prompt_that_was_given_up_while_it_was_computed() -> None:
    world = world_of("p2p-nccl-put-async", published=True)
    xid = world.arrive(8)
    world.begin(xid, 8)
    world.release(xid)
    while world.running is not None:
        world.layer()
    assert not world.held
    world.teardown()


@pytest.mark.parametrize("name", ["p2p-nccl-get"])
def test_a_reader_is_notified_of_the_staging_address(name: str) -> None:
    world = world_of(name)
    events: list[Any] = []
    handle = world.protocol.handle
    world.protocol.handle = lambda event, now: (events.append(event), handle(event, now))[1]  # type: ignore[method-assign, func-returns-value]
    xid = world.arrive(8)
    world.compute(xid, 8)
    (finished,) = (event for event in events if isinstance(event, PrefillFinished))
    assert finished.allocation == world.staged[xid]
