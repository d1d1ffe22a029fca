"""A node whose endpoints exchange KV with those of other nodes over the fabric."""

from __future__ import annotations

from collections.abc import Container

from pdflow.memory.paged import PagedPool
from pdflow.methods.wire_profile import Side
from pdflow.protocol.consumer.scheduler import ConsumerScheduler
from pdflow.protocol.effects import Fence, Handshake, Send
from pdflow.protocol.invariants.obligations import outlived, unexposed, wrong_quarantine
from pdflow.protocol.producer.rank import ProducerRank
from pdflow.protocol.values import Address
from pdflow.serving.core import Core, Endpoint, Port
from pdflow_sim.nodes.node import SimNode, SimPort
from pdflow_sim.nodes.ports import NodePorts


class PeerNode(SimNode):
    """A node that is a peer of others. Args: `side`: the side of its endpoints, unless `add` is given another."""

    def __init__(self, ports: NodePorts, side: Side, core: Core | None = None) -> None:
        super().__init__(ports.clock, ports.metrics, core)
        self.fabric = ports.fabric
        self.router = ports.router
        self.side = side
        self.do[Send] = self.fabric.send
        self.do[Handshake] = self.handshake
        self.do[Fence] = self.fence

    def add(self, address: Address, endpoint: Endpoint, incarnation: int, side: Side | None = None) -> SimPort:
        """Add an endpoint to the node and to the fabric. Args: `side`: the endpoint's, if it is not its node's."""
        port = SimPort(self, address, endpoint, incarnation, self.side if side is None else side)
        self.core.add(port)
        self.fabric.ports[address] = port
        return port

    def handshake(self, port: SimPort, effect: Handshake) -> None:
        self.fabric.handshake(port, effect.peer)

    def fence(self, port: SimPort, effect: Fence) -> None:
        self.fabric.fence(port, effect.peer)

    def unfulfilled(self) -> str:
        for address, port in self.ports.items():
            endpoint = port.endpoint
            if isinstance(endpoint, ProducerRank):
                exposed = self.fabric.word_values.get(address, {})
                wrong = unexposed(endpoint, exposed)
                if not wrong and self.fabric.checks_words:
                    wrong = outlived(endpoint, exposed)
                if wrong:
                    return f"at {address}, {wrong}"
        return ""

    def misplaced(self, port: Port, pool: PagedPool, staged: Container[int] | None) -> str:
        """Describe, in words, which blocks that a scheduler of D has granted are not kept as ordered; "" if none. Args:
        as `wrong_quarantine` has them."""
        scheduler = port.endpoint
        assert isinstance(scheduler, ConsumerScheduler)
        wrong = wrong_quarantine(scheduler, pool, staged)
        return f"at {port.address}, {wrong}" if wrong else ""
