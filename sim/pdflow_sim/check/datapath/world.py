"""Engines that compute, copy, send, take in and load pieces, one move at a time: states, and what may happen.

The product's code decides: `Staging` which piece has room, `Shipment` what may be posted and how it ended, `runs` where
tokens go, `Guards` what the originals lack. This module has what surrounds them: the order of computing, lanes, faults,
and which token lies in every cell. Messages are not here: the endpoints have scopes of their own.

Whatever happens, something goes on that never goes back. So what can't end comes to a state without moves.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import TypeVar

from pdflow.methods.method import MemoryKind
from pdflow.methods.shipment import Piece
from pdflow.protocol.values import Allocation
from pdflow_sim.check.datapath.findings import Finding
from pdflow_sim.check.datapath.request import ExploredRequest, PieceStage, RequestPhase
from pdflow_sim.check.datapath.room import Content, ExploredRoom
from pdflow_sim.check.datapath.setting import BLOCK_TOKENS, TOKENS, Setting
from pdflow_sim.check.search.forward import Move, Violation

Forked = TypeVar("Forked", bound="DataPathWorld")


class DataPathWorld:
    """A state of the data path, and the moves that are possible in it; their effects are in `acts.py`."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.pieces = setting.pieces
        method = setting.method
        self.requests = [ExploredRequest(r % setting.ps, len(self.pieces)) for r in range(2)]
        self.at_p = [self.room(method.p_memory) for _ in range(setting.ps)]
        self.at_d = self.room(method.d_memory)
        self.seat: int | None = None
        """The request that has all of D's blocks: its block table is 0, 1 and so on."""
        self.blocks: dict[tuple[int, int, int], Content] = {}
        """Contents of D's blocks, by block, offset and layer."""
        self.line: list[tuple[int, int]] = []
        """Pieces that wait for D's listener."""
        self.deaf = False
        """Whether D's listener has ended."""
        self.dead: int | None = None
        self.faults = setting.faults
        self.action = ""
        """What happened last, in words."""
        self.own: set[int] = set()
        """Ids of the objects that no other state shares: only these may be changed."""

    def room(self, memory: MemoryKind) -> ExploredRoom | None:
        return None if memory is MemoryKind.BLOCKS else ExploredRoom(self.setting.memory(memory), {})

    def fork(self: Forked) -> Forked:
        other = type(self).__new__(type(self))
        other.setting, other.pieces = self.setting, self.pieces
        other.requests, other.at_p, other.at_d = self.requests.copy(), self.at_p.copy(), self.at_d
        other.own = set()
        other.seat = self.seat
        other.blocks, other.line = self.blocks.copy(), self.line.copy()
        other.deaf, other.dead, other.faults, other.action = self.deaf, self.dead, self.faults, ""
        return other

    def fingerprint(self) -> Hashable:
        memories = tuple([None if memory is None else memory.fingerprint() for memory in (*self.at_p, self.at_d)])
        requests = tuple([request.fingerprint() for request in self.requests])
        blocks = frozenset(self.blocks.items())
        return requests, memories, self.seat, blocks, tuple(self.line), self.deaf, self.dead, self.faults

    def request(self, r: int) -> ExploredRequest:
        """Return a request, to be changed."""
        request = self.requests[r]
        if id(request) not in self.own:
            request = self.requests[r] = request.fork()
            self.own.add(id(request))
        return request

    def source(self, p: int) -> ExploredRoom | None:
        """Return the staging memory of a P, to be changed."""
        room = self.at_p[p]
        if room is not None and id(room) not in self.own:
            room = self.at_p[p] = room.fork()
            self.own.add(id(room))
        return room

    def target(self) -> ExploredRoom | None:
        """Return D's staging memory, to be changed."""
        if self.at_d is not None and id(self.at_d) not in self.own:
            self.at_d = self.at_d.fork()
            self.own.add(id(self.at_d))
        return self.at_d

    # What may happen.

    def moves(self) -> Iterator[Move]:
        """Yield all possible moves, in whatever order. There are no deadlines."""
        for p in range(self.setting.ps):
            r = self.next_prompt(p)
            if r is not None:
                yield ("compute", r, 0)
        for r, request in enumerate(self.requests):
            alive = request.p != self.dead
            if alive and self.to_copy(r):
                yield ("copy", r, 0)
            if request.phase is RequestPhase.UNASKED and self.may_ask(request):
                yield ("ask", r, 0)
            if request.phase is RequestPhase.OPEN and alive and PieceStage.READY in request.stages:
                lanes = self.setting.pipeline_policy.sending_lanes
                if (lanes is None or self.sent_at_once(request.p) < lanes) and self.is_next(request):
                    yield ("post", r, 0)
            for i, stage in enumerate(request.stages):
                if stage is PieceStage.TAKEN and alive:
                    yield ("land", r, i)
                    if self.faults:
                        yield ("lose", r, i)
            if request.phase is RequestPhase.HERE and self.seat in (None, r):
                yield ("admit", r, 0)
            if request.phase is RequestPhase.ADMITTED:
                yield ("load", r, 0)
            if request.phase is RequestPhase.LOADED:
                yield ("end", r, 0)
        if self.line and not self.deaf and self.taken() < (self.setting.pipeline_policy.receiving_lanes or 0):
            yield ("take", *self.line[0])
        if self.setting.ps > 1 and self.faults:
            yield ("die", self.setting.ps - 1, 0)

    def next_prompt(self, p: int) -> int | None:
        """Return the request whose prompt P computes next; None if it has none left, or has to wait."""
        pipeline_policy = self.setting.pipeline_policy
        if p == self.dead:
            return None
        for r, request in enumerate(self.requests):
            if request.p != p or request.phase is RequestPhase.FAILED:
                continue
            waits = pipeline_policy.prefill_waits and (
                request.phase is RequestPhase.OPEN or not self.setting.room_with_write
            )
            if pipeline_policy.early and waits and not self.has_room(r):
                return None
            if PieceStage.TO_COME in request.stages:
                return r
            until = PieceStage.LANDED if self.setting.method.p_memory is MemoryKind.TENSORS else PieceStage.READY
            if waits and min(request.stages) < until:
                return None
        return None

    def has_room(self, r: int) -> bool:
        """True if all that has been computed of a request has room where it is sent from."""
        request = self.requests[r]
        computed = [i for i, stage in enumerate(request.stages) if stage is PieceStage.COMPUTED]
        return all(self.name(r, i) in request.source for i in computed)

    def to_copy(self, r: int) -> list[int]:
        """Return the pieces that P may copy next: a piece as soon as it is computed, or all that has room when the
        prompt is."""
        request = self.requests[r]
        found = [
            i
            for i, stage in enumerate(request.stages)
            if stage is PieceStage.COMPUTED and self.name(r, i) in request.source
        ]
        return found[:1] if self.setting.pipeline_policy.early else found

    def may_ask(self, request: ExploredRequest) -> bool:
        setting = self.setting
        answered = min(request.stages) >= (PieceStage.COMPUTED if setting.room_with_write else PieceStage.READY)
        if (setting.method.pulls or setting.pipeline_policy.answer_first) and not answered:
            return False
        return setting.method.staged_at_d or self.seat is None

    def is_next(self, request: ExploredRequest) -> bool:
        return request.shipment is not None and request.shipment.fork().next() is not None

    def sent_at_once(self, p: int) -> int:
        return sum(
            stage in (PieceStage.POSTED, PieceStage.TAKEN)
            for request in self.requests
            if request.p == p
            for stage in request.stages
        )

    def taken(self) -> int:
        return sum(stage is PieceStage.TAKEN for request in self.requests for stage in request.stages)

    def name(self, r: int, i: int) -> str:
        """Return the name under which a piece has room: its prompt's, or its own."""
        return f"r{r}" if self.setting.guards.reserves_whole else f"r{r}.{i}"

    # What must be so.

    def check_data(self, r: int) -> None:
        """Check that every token of every layer is in its cell. Raises Violation."""
        request = self.requests[r]
        for layer in range(self.setting.layers):
            for token in range(TOKENS):
                block, offset = divmod(token, BLOCK_TOKENS)
                content = self.blocks.get((block, offset, layer))
                if content != (r, layer, token):
                    finding = Finding.SKIPPED if PieceStage.LOST in request.stages else Finding.INDEX
                    raise Violation(finding, f"r{r} decodes with {content} as token {token} of layer {layer}")

    def at_rest(self) -> None:
        """Check, where no move is possible, that all have ended and nothing is kept. Raises Violation."""
        memories = [memory for memory in (*self.at_p, self.at_d) if memory is not None]
        left = [f"r{r}" for r, request in enumerate(self.requests) if request.phase < RequestPhase.DONE]
        if self.deaf:
            raise Violation(Finding.DEAF, "D receives nothing any more, from any P")
        if left:
            what = f"{' and '.join(left)} cannot end"
            if self.dead is not None:
                raise Violation(Finding.PEER, what)
            waiting = any(memory.staging.waiting for memory in memories)
            raise Violation(Finding.RING if waiting else Finding.STUCK, what)
        if (
            any(memory.cells or memory.staging.held or memory.staging.waiting for memory in memories)
            or self.seat is not None
        ):
            raise Violation(Finding.KEPT, "memory is held although all requests have ended")

    # Small words.

    def cell(self, room: ExploredRoom, allocations: dict[str, Allocation], r: int, i: int, token: int) -> Hashable:
        """Return the address of a piece's token in a memory."""
        piece = self.pieces[i]
        if self.setting.guards.reserves_whole:
            return room.address(allocations[self.name(r, i)], piece.layer, token)
        return room.address(allocations[self.name(r, i)], 0, token - piece.start)

    def tokens(self, i: int) -> int:
        """Return for how many tokens room is requested with this piece."""
        whole = self.setting.guards.reserves_whole
        return TOKENS if whole else self.pieces[i].stop - self.pieces[i].start

    def tokens_of(self, name: str) -> int:
        return TOKENS if self.setting.guards.reserves_whole else self.tokens(int(name.partition(".")[2]))

    def describe_pieces(self, r: int, of: Iterable[int]) -> str:
        return f"{', '.join(describe_piece(self.pieces[i]) for i in of)} of r{r}"


def request_of(name: str) -> int:
    return int(name[1:].partition(".")[0])


def describe_piece(piece: Piece) -> str:
    return f"layer {piece.layer} [{piece.start}, {piece.stop})"
