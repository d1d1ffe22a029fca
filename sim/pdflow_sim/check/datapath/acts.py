"""The effects of each move of a data path world, and the steps that follow by themselves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pdflow.methods.guards import Loss, loss_of
from pdflow.methods.pages import counted_from, runs
from pdflow.methods.shipment import Shipment, ShipmentEnd
from pdflow_sim.check.datapath.request import PieceStage, RequestPhase
from pdflow_sim.check.datapath.room import Content
from pdflow_sim.check.datapath.setting import BLOCK_TOKENS, TOKENS
from pdflow_sim.check.datapath.world import DataPathWorld, request_of
from pdflow_sim.check.search.forward import Move, attributed


class Acts(DataPathWorld):
    """A data path world with the effects of its moves, which can be searched."""

    # What comes of it.

    def after(self, move: Move) -> Acts:
        """Return the state that a move leads to. Raises Violation."""
        verb, subject, i = move
        other = self.fork()
        act: Callable[..., None] = getattr(other, verb)
        with attributed(other):
            act(subject, i)
            other.settle()
        return other

    def compute(self, r: int, _: int) -> None:
        request = self.request(r)
        first = request.stages.index(PieceStage.TO_COME)
        now = range(first, first + 1 if self.setting.pipeline_policy.early else len(self.pieces))
        self.action = f"P{request.p} computes {self.describe_pieces(r, now)}"
        for i in now:
            request.stages[i] = PieceStage.COMPUTED
            if self.at_p[request.p] is None:
                self.ready(r, i)
            elif request.phase is RequestPhase.OPEN or not self.setting.room_with_write:
                self.enqueue(r, i)

    def enqueue(self, r: int, i: int) -> None:
        """Let P ask for room in staging memory from which a piece is sent."""
        request = self.request(r)
        room, name = self.source(request.p), self.name(r, i)
        assert room is not None
        if name not in request.source and name not in room.staging.waiting:
            room.staging.enqueue(name, self.tokens(i))

    def copy(self, r: int, _: int) -> None:
        request = self.request(r)
        now = self.to_copy(r)
        self.action = f"P{request.p} copies {self.describe_pieces(r, now)} into staging memory"
        room = self.source(request.p)
        assert room is not None
        for i in now:
            piece = self.pieces[i]
            for token in range(piece.start, piece.stop):
                room.cells[self.cell(room, request.source, r, i, token)] = (r, piece.layer, token)
            self.ready(r, i)

    def ready(self, r: int, i: int) -> None:
        request = self.request(r)
        request.stages[i] = PieceStage.READY
        if request.shipment is not None:
            request.shipment.offer(self.pieces[i])

    def ask(self, r: int, _: int) -> None:
        request = self.request(r)
        self.action = f"D asks for r{r}"
        request.phase = RequestPhase.ASKED
        at_d = self.target()
        if at_d is None:
            self.seat = r
        elif self.setting.guards.reserves_whole:
            at_d.staging.enqueue(f"r{r}", TOKENS)
            return
        self.register(r)

    def register(self, r: int) -> None:
        request = self.request(r)
        request.phase = RequestPhase.OPEN
        request.shipment = Shipment(self.setting.layers, 0, TOKENS)
        for i, stage in enumerate(request.stages):
            if stage is PieceStage.READY:
                request.shipment.offer(self.pieces[i])
            elif stage is PieceStage.COMPUTED and self.setting.room_with_write:
                self.enqueue(r, i)

    def post(self, r: int, _: int) -> None:
        request = self.request(r)
        assert request.shipment is not None
        piece = request.shipment.next()
        assert piece is not None
        i = self.pieces.index(piece)
        request.stages[i] = PieceStage.POSTED
        if self.at_p[request.p] is not None and self.name(r, i) not in request.source:
            self.action = f"P{request.p} has evicted {self.describe_pieces(r, [i])}"
            self.gone(r, i)
        elif self.setting.pipeline_policy.receiving_lanes is not None:
            self.action = f"P{request.p} announces {self.describe_pieces(r, [i])}"
            self.line.append((r, i))
        elif (at_d := self.target()) is not None and not self.setting.guards.reserves_whole:
            self.action = f"P{request.p} asks D for memory for {self.describe_pieces(r, [i])}"
            at_d.staging.enqueue(self.name(r, i), self.tokens(i))
        else:
            self.action = (
                f"{'D reads' if self.setting.method.pulls else f'P{request.p} writes'} {self.describe_pieces(r, [i])}"
            )
            request.stages[i] = PieceStage.TAKEN

    def take(self, r: int, i: int) -> None:
        request, room, name = self.request(r), self.target(), self.name(r, i)
        self.action = f"D's listener receives {self.describe_pieces(r, [i])}"
        if room is not None and name not in request.target:
            room.staging.enqueue(name, self.tokens(i))
            self.settle()
            if name not in request.target:
                room.staging.forget(name)
                if not self.setting.guards.survives_exhaustion:
                    self.action += ": there is no space, and it ends"
                    self.deaf = True
                    return
                self.action += ": there is no space, and it refuses"
                del self.line[0]
                self.gone(r, i)
                return
        del self.line[0]
        request.stages[i] = PieceStage.TAKEN

    def land(self, r: int, i: int) -> None:
        request, piece = self.request(r), self.pieces[i]
        self.action = f"{self.describe_pieces(r, [i])} lands at D"
        at_p = self.at_p[request.p]
        bytes_: list[Content] = [(r, piece.layer, token) for token in range(piece.start, piece.stop)]
        if at_p is not None:
            bytes_ = [
                at_p.cells.get(self.cell(at_p, request.source, r, i, token)) for token in range(piece.start, piece.stop)
            ]
        at_d = self.target()
        if at_d is None:
            self.fill(r, i, piece.start, lambda source: bytes_[source])
        else:
            for token, content in zip(range(piece.start, piece.stop), bytes_, strict=True):
                at_d.cells[self.cell(at_d, request.target, r, i, token)] = content
        request.stages[i] = PieceStage.LANDED
        assert request.shipment is not None
        request.shipment.landed(piece)
        self.sent(r, i)

    def lose(self, r: int, i: int) -> None:
        self.faults -= 1
        self.action = f"{self.describe_pieces(r, [i])} is lost"
        self.gone(r, i)

    def gone(self, r: int, i: int) -> None:
        """Record that a posted piece will not land."""
        request = self.request(r)
        assert request.shipment is not None
        request.stages[i] = PieceStage.LOST
        if loss_of(self.setting.guards, p_has_died=False) is Loss.SKIPPED:
            self.action += ", and is skipped"
            request.shipment.skip(self.pieces[i])
        else:
            request.shipment.lost()
        if (
            not self.setting.guards.reserves_whole
            and (allocation := request.target.pop(self.name(r, i), None)) is not None
        ):
            at_d = self.target()
            assert at_d is not None
            at_d.release(allocation, self.tokens(i))
        self.sent(r, i)

    def sent(self, r: int, i: int) -> None:
        """Release the room that P no longer needs: that of this piece, and of the whole prompt if all is sent."""
        request = self.request(r)
        assert request.shipment is not None
        if not self.setting.guards.reserves_whole:
            self.release(r, self.name(r, i))
        ending = request.shipment.ending()
        if ending is ShipmentEnd.SENT:
            request.phase = RequestPhase.HERE
            for name in tuple(request.source):
                self.release(r, name)
        elif ending is not None:
            self.fail(r)

    def release(self, r: int, name: str) -> None:
        request = self.request(r)
        room = self.source(request.p)
        if name in request.source and room is not None:
            room.release(request.source.pop(name), self.tokens_of(name))

    def fail(self, r: int) -> None:
        """Fail a request: all room that it has or waits for is given back."""
        request = self.request(r)
        request.phase = RequestPhase.FAILED
        self.action += f"; r{r} must be computed again"
        for name in {self.name(r, i) for i in range(len(self.pieces))}:
            for room in (self.source(request.p), self.target()):
                if room is not None:
                    room.staging.forget(name)
            self.release(r, name)
        self.unload(r)
        if self.seat == r:
            self.free()

    def admit(self, r: int, _: int) -> None:
        request = self.request(r)
        self.action = f"D's engine admits r{r}"
        request.phase = RequestPhase.ADMITTED
        self.seat = r

    def load(self, r: int, _: int) -> None:
        """Copy a request into blocks, if it is not there already; all that lies there must be its own."""
        request, room = self.request(r), self.target()
        self.action = f"D loads r{r} for decoding"
        request.phase = RequestPhase.LOADED
        if room is not None:
            for i, piece in enumerate(self.pieces):
                if request.stages[i] is PieceStage.LANDED:
                    guards = self.setting.guards
                    allocation, layer = request.target[self.name(r, i)], piece.layer if guards.reserves_whole else 0
                    self.fill(r, i, counted_from(piece, guards), partial(room.read, allocation, layer))
            self.unload(r)
        self.check_data(r)

    def end(self, r: int, _: int) -> None:
        request = self.request(r)
        self.action = f"r{r} ends"
        request.phase = RequestPhase.DONE
        self.free()

    def die(self, p: int, _: int) -> None:
        self.faults -= 1
        self.action = f"P{p} crashes"
        self.dead = p
        self.at_p[p] = self.room(self.setting.method.p_memory)
        for r, request in enumerate(self.requests):
            if request.p != p or request.phase > RequestPhase.OPEN:
                continue
            request = self.request(r)
            request.source.clear()
            if self.setting.guards.ends_receives:
                self.line = [waiting for waiting in self.line if waiting[0] != r]
                self.fail(r)
                request.stages = [
                    PieceStage.LOST if PieceStage.POSTED <= stage <= PieceStage.TAKEN else stage
                    for stage in request.stages
                ]

    # What follows of itself.

    def settle(self) -> None:
        """Give room to the requests and pieces that are next, and evict what has to go for them, unless it is being
        sent or copied."""
        if self.at_d is not None and self.at_d.staging.waiting:
            self.settle_at_d()
        for p, shared in enumerate(self.at_p):
            if shared is not None and shared.staging.waiting:
                room = self.source(p)
                assert room is not None
                for name in room.staging.victims():
                    self.evict(name)
                for name, allocation in room.admit_waiting(self.tokens_of):
                    self.request(request_of(name)).source[name] = allocation

    def settle_at_d(self) -> None:
        at_d = self.target()
        assert at_d is not None
        for name, allocation in at_d.admit_waiting(self.tokens_of):
            r = request_of(name)
            request = self.request(r)
            request.target[name] = allocation
            if self.setting.guards.reserves_whole:
                self.register(r)
            elif self.setting.pipeline_policy.receiving_lanes is None:
                request.stages[int(name.partition(".")[2])] = PieceStage.TAKEN

    def evict(self, name: str) -> None:
        r = request_of(name)
        stages = self.request(r).stages
        own = [stage for i, stage in enumerate(stages) if self.name(r, i) == name]
        if not any(stage in (PieceStage.COMPUTED, PieceStage.POSTED, PieceStage.TAKEN) for stage in own):
            self.release(r, name)

    def fill(self, r: int, i: int, first: int, read: Callable[[int], Content]) -> None:
        """Copy a piece into the request's blocks; `first` is the token at which its source begins."""
        assert self.seat == r
        piece = self.pieces[i]
        for run in runs(piece, first, BLOCK_TOKENS):
            for k in range(run.tokens):
                block, offset = divmod(run.offset + k, BLOCK_TOKENS)
                self.blocks[run.block + block, offset, piece.layer] = read(run.source + k)

    def unload(self, r: int) -> None:
        request = self.request(r)
        at_d = self.target()
        for name, allocation in request.target.items():
            assert at_d is not None
            at_d.release(allocation, self.tokens_of(name))
        request.target.clear()

    def free(self) -> None:
        self.seat = None
        self.blocks = {}
