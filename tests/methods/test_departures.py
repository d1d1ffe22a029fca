"""Prompts leave P's blocks once, whole, and before these are given back: whoever copies, at once or later."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdflow.methods.catalogue import METHODS
from pdflow.methods.departures import Departure, Departures
from pdflow.methods.shipment import Piece
from pdflow.methods.staging import KvSize, PagedStaging
from pdflow.protocol.values import Allocation, Xid

LAYERS = 2
STAGED = ("cpu-staged", "p2p-nccl-put", "p2p-nccl-put-async", "p2p-nccl-get", "mooncake-v0")


class Prompt:
    """What its host knows of it."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.known = 0
        self.in_blocks = True
        self.begun = self.finished = self.posted = self.wanted_back = self.over = False
        self.ended = False
        """Its prefill has ended without all of its KV, and its blocks are the engine's."""
        self.there: set[tuple[int, int]] = set()
        """Layers of tokens that lie where they are sent from."""


class World(RuleBasedStateMachine):
    """The host, and the protocol as far as it matters here: what is posted ends some time, and is let go of."""

    @initialize(name=st.sampled_from(STAGED), at_once=st.booleans())
    def build(self, name: str, at_once: bool) -> None:
        self.method = METHODS[name]
        self.at_once = at_once
        staging = PagedStaging(KvSize(LAYERS, 1), 4, 8, evicts=name == "p2p-nccl-get")
        self.departures = Departures(self, self.method, self.method.strict, staging, LAYERS, 1)
        self.prompts: dict[Xid, Prompt] = {}
        self.copies: list[tuple[Departure, Piece | None]] = []
        self.waits: set[Xid] = set()
        self.places: dict[Xid, Allocation] = {}
        self.count = 0

    # What happens.

    @rule(tokens=st.integers(1, 20))
    def arrive(self, tokens: int) -> None:
        self.count += 1
        self.prompts[f"x{self.count}"] = Prompt(tokens)

    def some(self, data: st.DataObject, which: Any) -> Xid | None:
        found = [xid for xid, prompt in self.prompts.items() if which(prompt)]
        return data.draw(st.sampled_from(found)) if found else None

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """The engine computes a part of a prompt; what is early leaves layer by layer."""
        xid = self.some(data, lambda prompt: prompt.known < prompt.tokens and not prompt.ended)
        if xid is None:
            return
        prompt = self.prompts[xid]
        known = data.draw(st.integers(prompt.known + 1, prompt.tokens))
        if self.method.strict.early and self.departures.concerns(known, prompt.tokens):
            self.departures.computing(prompt, xid, prompt.tokens, known, known)
        prompt.known = known
        if known == prompt.tokens:
            self.departures.computed(prompt, xid, prompt.tokens)

    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        """The protocol posts a WRITE of what it holds, or D reads it."""
        xid = self.some(data, lambda prompt: (prompt.begun or prompt.finished) and not (prompt.posted or prompt.over))
        if xid is not None:
            self.prompts[xid].posted = True
            if not self.method.pulls:
                self.departures.written(xid)

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """What was posted has ended, all of it having gone, or a lease has; the protocol lets go."""
        xid = self.some(data, lambda prompt: prompt.posted and self.has_gone(prompt) and not prompt.over)
        if xid is not None:
            self.prompts[xid].over = True
            self.departures.released(xid)

    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        """The protocol lets go of a prompt wherever it is: it may wait for room, or be computed still."""
        xid = self.some(data, lambda prompt: (prompt.begun or prompt.finished) and not prompt.over)
        if xid is not None:
            self.prompts[xid].over = True
            self.departures.released(xid)

    @rule(data=st.data())
    def end_early(self, data: st.DataObject) -> None:
        """Its prefill is taken back. What the protocol holds of it is let go of later."""
        xid = self.some(data, lambda prompt: prompt.known < prompt.tokens and not prompt.ended)
        if xid is not None:
            self.prompts[xid].in_blocks, self.prompts[xid].ended = False, True
            self.departures.ended(xid)
            self.departures.grant()

    @invariant()
    def nobody_waits_for_room_who_is_not_on_its_way(self) -> None:
        if hasattr(self, "departures"):
            waiting = self.departures.staging.waiting
            assert set(waiting) <= set(self.departures.outgoing)
            assert not any(self.departures.outgoing[xid].over for xid in waiting)

    def has_gone(self, prompt: Prompt) -> bool:
        return prompt.finished and (self.method.pulls or len(prompt.there) == LAYERS * prompt.tokens)

    @precondition(lambda self: self.copies)
    @rule(data=st.data())
    def copy(self, data: st.DataObject) -> None:
        self.copied(*self.copies.pop(data.draw(st.integers(0, len(self.copies) - 1))))

    def copied(self, going: Departure, piece: Piece | None) -> None:
        prompt: Prompt = going.leg
        assert prompt.in_blocks or prompt.ended, "its blocks were somebody else's"
        if going.xid in self.places:
            layers = range(LAYERS) if piece is None else (piece.layer,)
            first, last = (0, prompt.tokens) if piece is None else (piece.start, piece.stop)
            cells = {(layer, token) for layer in layers for token in range(first, last)}
            assert not cells & prompt.there
            prompt.there |= cells
        self.departures.done_copying(going, 1)

    # What `Departures` asks for.

    def announce(self, going: Departure) -> None:
        assert not going.leg.begun
        going.leg.begun = True

    def finish(self, going: Departure) -> None:
        prompt: Prompt = going.leg
        assert not prompt.finished
        assert prompt.known == prompt.tokens or not self.method.pulls
        if self.method.pulls:
            assert len(prompt.there) == LAYERS * prompt.tokens, "D may read it from now on"
        prompt.finished = True

    def withdraw(self, xid: Xid) -> None:
        """Nobody reads it, so the protocol lets go at once; but in a turn of its own."""
        self.prompts[xid].wanted_back = True

    @precondition(lambda self: any(prompt.wanted_back and prompt.finished for prompt in self.prompts.values()))
    @rule()
    def let_go(self) -> None:
        for xid, prompt in tuple(self.prompts.items()):
            if prompt.wanted_back and prompt.finished and not prompt.over:
                prompt.over = True
                self.departures.released(xid)

    def layers_of(self, going: Departure, chunk: int, before: int) -> None:
        for layer in range(LAYERS):
            self.departures.layer_computed(going, Piece(layer, before, chunk), 1)

    def copy_out(self, going: Departure, piece: Piece | None) -> None:
        assert going.leg.in_blocks
        if self.at_once:
            self.copied(going, piece)
        else:
            self.copies.append((going, piece))

    def has_left(self, going: Departure) -> None:
        assert going.leg.in_blocks
        going.leg.in_blocks = False

    def forget(self, xid: Xid) -> None:
        assert not self.prompts[xid].in_blocks
        del self.prompts[xid]

    def took_room(self, going: Departure) -> None:
        assert going.place is not None
        self.places[going.xid] = going.place

    def gave_room_back(self, going: Departure) -> None:
        del self.places[going.xid]

    def recall(self, xid: Xid) -> None: ...

    def wait_for(self, xid: Xid) -> None:
        self.waits.add(xid)

    def wait_no_more(self, xid: Xid) -> None:
        self.waits.discard(xid)

    @invariant()
    def whoever_has_left_lies_where_it_is_sent_from(self) -> None:
        for prompt in getattr(self, "prompts", {}).values():
            if not prompt.in_blocks and not prompt.over and not prompt.ended:
                assert len(prompt.there) == LAYERS * prompt.tokens

    def teardown(self) -> None:
        """Everything goes on, and ends."""
        if not hasattr(self, "prompts"):
            return
        for _ in range(4 * len(self.prompts) + 4):
            while self.copies:
                self.copied(*self.copies.pop())
            for xid, prompt in tuple(self.prompts.items()):
                if prompt.ended:
                    if not prompt.over:
                        prompt.over = True
                        self.departures.released(xid)
                elif prompt.known < prompt.tokens:
                    before, prompt.known = prompt.known, prompt.tokens
                    if self.method.strict.early and before < prompt.tokens:
                        self.departures.computing(prompt, xid, prompt.tokens, prompt.tokens, prompt.tokens)
                    self.departures.computed(prompt, xid, prompt.tokens)
                elif (prompt.begun or prompt.finished) and not prompt.posted:
                    prompt.posted = True
                    if not self.method.pulls:
                        self.departures.written(xid)
                elif prompt.posted and not prompt.over and self.has_gone(prompt):
                    prompt.over = True
                    self.departures.released(xid)
        assert not self.prompts
        assert not self.waits
        assert not self.places
        self.departures.assert_empty("P")


TestDepartures = World.TestCase
TestDepartures.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_two_chunks_that_waited_for_room_are_both_copied_before_the_blocks_are_free() -> None:
    """Found by a live engine, which copies at once: behind the first chunk the blocks were given back."""
    world = World()
    world.build("cpu-staged", at_once=True)
    world.prompts["x"] = prompt = Prompt(8)
    world.departures.computing(prompt, "x", 8, 4, 4)
    world.departures.computing(prompt, "x", 8, 8, 8)
    prompt.known = 8
    world.departures.computed(prompt, "x", 8)
    world.departures.written("x")
    assert len(prompt.there) == LAYERS * 8
    assert not prompt.in_blocks


@pytest.mark.parametrize("tokens", [29, 32], ids=["partial tail", "exact fit"])
@pytest.mark.parametrize("name", ["cpu-staged", "p2p-nccl-put", "p2p-nccl-put-async"])
def test_a_put_that_is_given_up_while_it_waits_for_room_is_over_once(name: str, tokens: int) -> None:
    """Behind one that fills the memory: what comes free goes to the next one. It was forgotten twice."""
    world = World()
    world.build(name, at_once=True)
    assert world.departures.room_with_write
    for xid, its in (("first", tokens), ("given up", 4), ("next", 4)):
        world.prompts[xid] = prompt = Prompt(its)
        if world.method.strict.early:
            world.departures.computing(prompt, xid, its, its, its)
        prompt.known = its
        world.departures.computed(prompt, xid, its)
        prompt.posted = True
        world.departures.written(xid)
    assert list(world.places) == ["first"], "it fills the memory"
    assert list(world.departures.staging.waiting) == ["given up", "next"]
    world.prompts["given up"].over = True
    world.departures.released("given up")
    assert set(world.prompts) == {"first", "next"}
    world.prompts["first"].over = True
    world.departures.released("first")
    assert list(world.places) == ["next"]
    world.teardown()


def test_a_prefill_that_is_taken_back_while_its_put_waits_for_room_leaves_the_queue() -> None:
    """It was announced and is to be written while it is computed; what comes free then is none of its own."""
    world = World()
    world.build("cpu-staged", at_once=True)
    for xid, its in (("first", 32), ("taken back", 8)):
        world.prompts[xid] = prompt = Prompt(its)
        prompt.known = its if xid == "first" else 4
        world.departures.computing(prompt, xid, its, prompt.known, prompt.known)
        if prompt.known == its:
            world.departures.computed(prompt, xid, its)
        prompt.posted = True
        world.departures.written(xid)
    assert list(world.departures.staging.waiting) == ["taken back"]
    prompt.in_blocks, prompt.ended = False, True
    world.departures.ended("taken back")
    world.prompts["first"].over = True
    world.departures.released("first")
    assert not world.places, "it has no room, and gets none"
    world.teardown()


@pytest.mark.parametrize("name", STAGED)
def test_what_ends_early_leaves_nothing(name: str) -> None:
    world = World()
    world.build(name, at_once=True)
    world.prompts["x"] = prompt = Prompt(8)
    if world.method.strict.early:
        world.departures.computing(prompt, "x", 8, 4, 4)
    prompt.in_blocks = False
    world.departures.ended("x")
    if prompt.begun:
        world.departures.released("x")
    assert not world.prompts
    world.departures.assert_empty("P")
