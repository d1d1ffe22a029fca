"""A store between P and D: two prompts that may begin alike are put, got and given up in every order.

The real `StoreCore` decides: what has room, what is found, what is evicted, whom it answers. `objects_of` makes the
keys. `StorePort` takes what its two endpoints would do with each event. Of each block it is known what has been written
to it. Each of P and D is a process, and where processes salt their keys their salts differ.

P puts a prompt, and may give it up at any moment. What it has given up while it wrote is quarantined, and freed at any
later moment. P's lease on what is stored ends at any moment; D reads what it finds, or computes the prompt.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from enum import IntEnum
from typing import Any, Final

import attrs

from pdflow.methods.method import PipelinePolicy
from pdflow.methods.store.keys import origin
from pdflow.methods.store.memory import Item, StoreMemory
from pdflow.methods.store.objects import most_named, objects_of
from pdflow.protocol.effects import AnswerPrefill, Commit, Enqueue, FreeBlocks, Outcome, ReleaseBlocks, Resolve
from pdflow.protocol.events import (
    DecodeAborted,
    DecodeAdmitted,
    DecodeHit,
    DecodeQueued,
    PrefillFinished,
    SourceWithdrawn,
)
from pdflow.protocol.ids import EngineInfo, KvParams, Shards
from pdflow.protocol.messages import Code
from pdflow.protocol.values import Allocation, Instant
from pdflow.serving.core import Port
from pdflow.serving.effects import AnswerCall, AskForRoom, EndCall, Stored
from pdflow.serving.events import CallWithdrawn, LookupRequested, PutRequested, RoomDue
from pdflow.serving.store import StoreCore
from pdflow_sim.check.datapath.findings import Finding
from pdflow_sim.check.datapath.stub_endpoints import StubEndpoint
from pdflow_sim.check.search.forward import CopiedByMoves, Move, Violation

Tokens = tuple[int, ...]
BLOCK_TOKENS: Final = 2
P_SALT, D_SALT = 1, 2
SHARDS: Final = Shards(1, 1, BLOCK_TOKENS)


@attrs.frozen
class StoreSetting:
    """Two prompts, and the memory of the store's node."""

    prompts: tuple[Tokens, Tokens]
    num_blocks: int
    keeps: bool = True


SETTINGS: Final = (
    # Both fit, but not below the high-water mark.
    StoreSetting(((1, 2, 3, 4), (1, 2, 5, 6)), 3),
    # A tail of half a block, which is the beginning of the other's; each fills the memory exactly.
    StoreSetting(((1, 2, 3), (1, 2, 3, 4)), 2),
    # The second waits until the first is gone; nothing is kept.
    StoreSetting(((1, 2, 3, 4), (5, 6, 7)), 3, keeps=False),
    # The same prompt twice; the second may find it.
    StoreSetting(((1, 2, 3, 4), (1, 2, 3, 4)), 4),
    # One never fits.
    StoreSetting(((1, 2, 3, 4, 5), (1, 2)), 2),
)


class StoreRequestPhase(IntEnum):
    """The phase of a request."""

    TO_COME = 0
    WAITING = 1
    """P waits for room."""
    PUTTING = 2
    PUT = 3
    GETTING = 4
    DONE = 5
    FAILED = 6
    """Given up, refused, or not all was there: to be computed again."""


class EndpointStep:
    """Replaces the event after which an endpoint has this effect."""

    __slots__ = ("effect",)

    def __init__(self, effect: object) -> None:
        self.effect = effect


class StorePort(StubEndpoint):
    """The endpoint that is put to, or the one that is got from, as far as the store's core depends on it."""

    def __init__(self) -> None:
        self.targets: dict[str, DecodeAdmitted] = {}
        """By request, the room that its put has: P writes to it, and it is held until its lease ends."""
        self.offers: dict[str, PrefillFinished] = {}

    def handle(self, event: Any, now: Instant) -> tuple[Any, ...]:
        match event:
            case EndpointStep(effect=effect):
                return (effect,)
            case DecodeQueued():
                return (Enqueue(event.request_id),)
            case DecodeAdmitted():
                self.targets[event.request_id] = event
            case DecodeHit():
                return (Commit(event.request_id),)
            case DecodeAborted():
                return (Resolve(event.request_id, Outcome.CANCELLED, event.code),)
            case PrefillFinished():
                self.offers[event.xid] = event
                return (AnswerPrefill(event.xid, params_of(event.xid, event.num_tokens)),)
            case SourceWithdrawn():
                offer = self.offers.pop(event.xid)
                return (ReleaseBlocks(event.xid, offer.allocation, Code.CANCELLED),)
        return ()


def params_of(xid: str, num_tokens: int) -> KvParams:
    return KvParams(EngineInfo("store.get", SHARDS), xid, xid, num_tokens)


class StoreWorld(CopiedByMoves):
    """A state of the store, P and D; implements `Explorable`."""

    def __init__(self, pipeline_policy: PipelinePolicy, setting: StoreSetting = SETTINGS[0]) -> None:
        super().__init__()
        self.pipeline_policy = pipeline_policy
        self.salts = pipeline_policy.salts_keys
        self.setting = setting
        self.memory = StoreMemory(setting.num_blocks, setting.keeps)
        self.core = StoreCore(self.memory, BLOCK_TOKENS, self.count)
        self.puts, self.gets = StorePort(), StorePort()
        self.put_port, self.get_port = Port("store.put", self.puts, 1), Port("store.get", self.gets, 1)
        self.core.add(self.put_port)
        self.core.add(self.get_port)
        self.core.perform.update(
            {
                AskForRoom: self.ask_for_room,
                AnswerCall: self.answer,
                AnswerPrefill: self.nothing,
                EndCall: self.end_call,
                Stored: self.nothing,
            }
        )
        self.core.begin(self.put_port, self.get_port)
        self.phases = [StoreRequestPhase.TO_COME] * len(setting.prompts)
        self.due = False
        """Whether the core waits for RoomDue."""
        self.order: list[str] = []
        """Puts that wait for room, in the order of their coming."""
        self.calls: dict[str, bool] = {}
        """Calls that have not ended: whether each is answered."""
        self.quarantined: dict[str, Allocation] = {}
        self.cells: dict[int, Tokens] = {}
        """By block, all tokens of the prompt up to the block's last."""

    # What the core asks of its driver.

    def count(self, what: str, number: int) -> None:
        assert number >= 0, what

    def nothing(self, port: Port, effect: object) -> None:
        """Nothing in this world depends on it."""

    def ask_for_room(self, port: Port, effect: AskForRoom) -> None:
        assert not self.due, "asked for room twice"
        self.due = True

    def answer(self, port: Port, effect: AnswerCall) -> None:
        if self.calls.get(effect.xid) is not False:
            raise Violation(Finding.ANSWER, f"{effect.xid} is answered, but has not called")
        self.calls[effect.xid] = True
        if effect.params is None:
            self.fail(effect.xid)

    def end_call(self, port: Port, effect: EndCall) -> None:
        if not self.calls.pop(effect.xid, False):
            raise Violation(Finding.ANSWER, f"the call of {effect.xid} ends unanswered")

    def fail(self, xid: str) -> None:
        """Note that a put has failed, or that a lookup has found nothing."""
        r = int(xid[1])
        self.phases[r] = StoreRequestPhase.FAILED
        if xid in self.order:
            self.order.remove(xid)

    # What is there.

    def items(self, r: int, salt: int) -> tuple[Item, ...]:
        prompt = self.setting.prompts[r]
        start = origin("model", 0, 1, salt if self.salts else 0)
        end = most_named(len(prompt), BLOCK_TOKENS) * BLOCK_TOKENS
        named = [prompt[at : at + BLOCK_TOKENS] for at in range(0, end, BLOCK_TOKENS)]
        return objects_of(start, len(prompt), BLOCK_TOKENS, BLOCK_TOKENS, named, prompt[end:])

    def contents(self, r: int) -> list[Tokens]:
        """Return the contents of each block of a prompt: all tokens up to the block's end, or the prompt's."""
        prompt = self.setting.prompts[r]
        return [prompt[: at + BLOCK_TOKENS] for at in range(0, len(prompt), BLOCK_TOKENS)]

    def fingerprint(self) -> Hashable:
        endpoints = self.puts.targets, self.gets.offers
        return (
            tuple(self.phases),
            self.due,
            tuple(self.order),
            tuple(self.calls.items()),
            tuple(self.quarantined.items()),
            tuple(sorted(self.cells.items())),
            tuple([tuple(sorted(table.items())) for table in endpoints]),
            self.core.ledger.fingerprint(),
            self.core.asked,
        )

    # What may happen.

    def moves(self) -> Iterator[Move]:
        """Yield the moves. P may give up a prompt, but does not have to: where nothing else can happen, all must have
        ended."""
        found = [*self.steps()]
        yield from found
        for r, phase in enumerate(self.phases) if found else ():
            if StoreRequestPhase.WAITING <= phase <= StoreRequestPhase.PUT and f"r{r}" in self.calls:
                yield ("give_up", r, 0)

    def steps(self) -> Iterator[Move]:
        if self.due:
            yield ("room", 0, 0)
        for r, phase in enumerate(self.phases):
            if phase is StoreRequestPhase.TO_COME:
                yield ("put", r, 0)
            elif phase is StoreRequestPhase.PUTTING:
                yield ("written", r, 0)
            elif phase is StoreRequestPhase.PUT:
                yield ("get", r, 0)
            elif phase is StoreRequestPhase.GETTING:
                yield ("read", r, 0)
            if f"r{r}" in self.quarantined:
                yield ("free", r, 0)
            if f"r{r}" in self.gets.offers:
                yield ("lapse", r, 0)

    @property
    def faults(self) -> int:
        return 0

    def start(self) -> StoreWorld:
        return StoreWorld(self.pipeline_policy, self.setting)

    def make(self, move: Move) -> None:
        verb, r, _ = move
        getattr(self, verb)(r)

    def put(self, r: int) -> None:
        self.action = f"P has computed r{r}, and asks the store for memory"
        self.phases[r] = StoreRequestPhase.WAITING
        self.calls[f"r{r}"] = False
        self.order.append(f"r{r}")
        params = KvParams(EngineInfo("p", SHARDS), f"r{r}", f"r{r}", len(self.setting.prompts[r]))
        self.core.feed(self.core.role, PutRequested(params, self.items(r, P_SALT)), 0)

    def room(self, _: int) -> None:
        self.action = "the store gives room to puts that wait"
        self.due = False
        before = set(self.puts.targets)
        self.core.feed(self.core.role, RoomDue(), 0)
        for name in [name for name in self.order if name in self.puts.targets and name not in before]:
            self.admitted(int(name[1]))
        for name in [name for name in self.order if name in self.gets.offers]:
            self.order.remove(name)
            self.phases[int(name[1])] = StoreRequestPhase.PUT

    def admitted(self, r: int) -> None:
        """Check what a put was given: in its turn, memory that nobody has, for what is not there."""
        name = f"r{r}"
        if self.order[0] != name and self.order[0] not in self.gets.offers:
            raise Violation(Finding.OVERTAKEN, f"{name} has room before {self.order[0]}, which came first")
        self.order.remove(name)
        room = self.puts.targets[name]
        taken = {block for other in self.held(name) for block in other.blocks}
        if taken & set(room.allocation.blocks):
            raise Violation(Finding.TWICE, f"{name} has room that is in use")
        missing = len(self.contents(r)) - len(room.allocation.blocks)
        if (room.token_start, room.num_tokens) != (
            missing * BLOCK_TOKENS,
            len(self.setting.prompts[r]) - missing * BLOCK_TOKENS,
        ):
            raise Violation(Finding.INDEX, f"{name} should be written, but not from token {room.token_start}")
        self.phases[r] = StoreRequestPhase.PUTTING

    def held(self, but: str) -> Iterator[Allocation]:
        """Yield what all others may write to or read."""
        yield from (room.allocation for name, room in self.puts.targets.items() if name != but)
        yield from (offer.allocation for offer in self.gets.offers.values())
        yield from self.quarantined.values()

    def written(self, r: int) -> None:
        self.action = f"P writes the missing pieces of r{r} to the store"
        room = self.puts.targets.pop(f"r{r}")
        self.phases[r] = StoreRequestPhase.PUT
        new = self.contents(r)[len(self.contents(r)) - len(room.allocation.blocks) :]
        for block, content in zip(room.allocation.blocks, new, strict=True):
            self.cells[block] = content
        self.core.feed(self.put_port, EndpointStep(Commit(f"r{r}")), 0)

    def give_up(self, r: int) -> None:
        self.action = f"P gives up r{r}"
        room = self.puts.targets.pop(f"r{r}", None)
        if room is not None:
            self.quarantined[f"r{r}"] = room.allocation
        self.phases[r] = StoreRequestPhase.FAILED
        self.core.feed(self.core.role, CallWithdrawn(f"r{r}", f"r{r}"), 0)

    def free(self, r: int) -> None:
        self.action = f"nothing can write to the room of r{r} any more"
        self.core.feed(self.put_port, EndpointStep(FreeBlocks(self.quarantined.pop(f"r{r}"))), 0)

    def lapse(self, r: int) -> None:
        self.action = f"P's lease on r{r} ends"
        self.release(f"r{r}")

    def release(self, xid: str) -> None:
        offer = self.gets.offers.pop(xid)
        self.core.feed(self.get_port, EndpointStep(ReleaseBlocks(xid, offer.allocation, Code.NONE)), 0)

    def get(self, r: int) -> None:
        xid = f"r{r}/get"
        self.action = f"D asks the store for r{r}"
        stored = f"r{r}" in self.gets.offers and self.setting.keeps
        self.calls[xid] = False
        self.phases[r] = StoreRequestPhase.GETTING
        self.core.feed(self.core.role, LookupRequested(f"r{r}", xid, self.items(r, D_SALT), 0, 0), 0)
        found = self.gets.offers.get(xid)
        if found is None and stored:
            raise Violation(Finding.SALT, f"the store has r{r}, and D does not find it")
        if found is not None and len(found.allocation.blocks) < len(self.contents(r)):
            self.action += ": not all is there"
            self.phases[r] = StoreRequestPhase.FAILED
            self.release(xid)

    def read(self, r: int) -> None:
        self.action = f"D has read r{r}"
        offer = self.gets.offers[f"r{r}/get"]
        read = [self.cells.get(block) for block in offer.allocation.blocks]
        if read != self.contents(r):
            raise Violation(Finding.STALE, f"r{r} decodes with {read}")
        self.phases[r] = StoreRequestPhase.DONE
        self.release(f"r{r}/get")

    def at_rest(self) -> None:
        """Check that all requests have ended and nothing is held. Raises Violation."""
        left = [f"r{r}" for r, phase in enumerate(self.phases) if phase < StoreRequestPhase.DONE]
        if left or self.calls:
            raise Violation(Finding.STUCK, f"{' and '.join(left or self.calls)} cannot end")
        try:
            self.core.assert_empty("the store")
        except AssertionError as wrong:
            raise Violation(Finding.KEPT, str(wrong)) from wrong
