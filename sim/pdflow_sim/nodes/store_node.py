"""The simulated node of a store: D towards the prefill engines, which put, and P towards the decode engines, which get.

`pdflow/serving/store.py` decides what it does with a prompt. Calls of the store's own, like PutStart, take a control
message's time and are never lost, like the router's. P answers its leg when a put is complete; the notice of that takes
no time.
"""

from __future__ import annotations

from collections.abc import Callable

from pdflow.methods.store.memory import StoreMemory
from pdflow.methods.wire_profile import Side
from pdflow.protocol.effects import AnswerPrefill, BumpWord
from pdflow.protocol.ids import Shards, rank_address
from pdflow.protocol.values import RequestId, Xid
from pdflow.serving.core import Port
from pdflow.serving.effects import AnswerCall, AskForRoom, EndCall, Stored
from pdflow.serving.events import CallWithdrawn, LookupRequested, PutRequested, RoomDue
from pdflow.serving.store import StoreCore
from pdflow.wiring.endpoints import Consumer, Producer
from pdflow.wiring.stores import get_name, put_name
from pdflow_sim.nodes.node import SimPort
from pdflow_sim.nodes.peer_node import PeerNode
from pdflow_sim.nodes.ports import NodePorts


class SimStoreNode(PeerNode):
    """One node of a store. Args: `name` is the node's; engines that put know it as "name.put", those that get as
    "name.get".

    It never stands still; no fault happens to it yet, but to what comes and goes.
    """

    def __init__(self, ports: NodePorts, name: str, memory: StoreMemory, block_size: int) -> None:
        self.storing = StoreCore(memory, block_size, self.count)
        super().__init__(ports, Side.P, self.storing)
        # A store calls nobody.
        self.makes_contact = False
        self.in_host_memory = True
        self.name = name
        self.memory = memory
        self.get_port: SimPort
        self.calls: dict[Xid, tuple[Callable[[AnswerCall], None], bool]] = {}
        """Calls by the transfer id under which the prompt would be got: the callback for the answer, and whether the
        answer takes a message's time.
        """
        self.do[BumpWord] = self.bump
        self.perform.update(
            {
                AskForRoom: self.ask_for_room,
                AnswerPrefill: self.expose,
                AnswerCall: self.answer,
                EndCall: self.end_call,
                Stored: self.stored,
            }
        )

    def make_ends(self, put: Consumer, get: Producer, shards: Shards, incarnation: int) -> None:
        """Add its endpoints on either side."""
        put_port = self.add(put_name(self.name), put[0], incarnation, Side.D)
        self.get_port = self.add(get_name(self.name), get[0], incarnation)
        for rank in range(shards.ranks):
            self.add(rank_address(put_name(self.name), rank), put[1][rank], incarnation, Side.D)
            self.add(rank_address(get_name(self.name), rank), get[1][rank], incarnation)
        self.storing.begin(put_port, self.get_port)

    # What engines ask of it.

    def start(self, arg: tuple[PutRequested, Callable[[AnswerCall], None]]) -> None:
        """Handle PutStart. The engine that puts is notified at once when the put has ended."""
        put, on_answer = arg
        self.calls[put.params.xid] = (on_answer, False)
        self.feed(self.role, put)

    def look(self, arg: tuple[LookupRequested, Callable[[AnswerCall], None]]) -> None:
        """Handle GetReplicaList."""
        ask, on_answer = arg
        self.calls[ask.xid] = (on_answer, True)
        self.feed(self.role, ask)

    def abort(self, arg: tuple[RequestId, Xid]) -> None:
        """Withdraw a call: no engine will come for its prompt."""
        self.feed(self.role, CallWithdrawn(*arg))

    def ask_for_room(self, port: Port, effect: AskForRoom) -> None:
        self.clock.call(0, self.room_due, RoomDue())

    def room_due(self, event: RoomDue) -> None:
        self.feed(self.role, event)

    def answer(self, port: Port, effect: AnswerCall) -> None:
        on_answer, takes_time = self.calls[effect.xid]
        if takes_time:
            self.clock.call(self.fabric.control_ns, on_answer, effect)
        else:
            on_answer(effect)

    def end_call(self, port: Port, effect: EndCall) -> None:
        del self.calls[effect.xid]

    def stored(self, port: Port, effect: Stored) -> None:
        """Ignore a stored prompt: the record has no field for it."""

    # Being read from.

    def expose(self, port: Port, effect: AnswerPrefill) -> None:
        for rank, lease_word in enumerate(effect.params.rank_words):
            self.fabric.expose_word(rank_address(self.get_port.address, rank), lease_word)

    def bump(self, port: SimPort, effect: BumpWord) -> None:
        self.fabric.forget_word(port.address, effect.lease_word)

    # At the end.

    def count(self, what: str, number: int) -> None:
        """Add to the result's counts."""
        if number:
            self.metrics.count(what, number)

    def newest_generation(self) -> int:
        return self.memory.pool.newest_generation

    def unfulfilled(self) -> str:
        return super().unfulfilled() or self.misplaced(self.storing.puts, self.memory.pool, self.memory.held)

    def assert_empty(self) -> None:
        self.core.assert_empty(self.name)
        assert not self.calls, f"{self.name} still keeps {list(self.calls)}"
