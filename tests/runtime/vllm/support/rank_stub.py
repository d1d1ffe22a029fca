"""A worker's half whose rank is an endpoint alone: a test carries out what it wants, and feeds it what arrives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdflow.protocol.effects import SendLocal
from pdflow.protocol.events import SourceReady
from pdflow.protocol.ids import rank_of
from pdflow.protocol.values import NEVER, Address, Instant
from pdflow.serving.core import Core, Port
from pdflow_runtime.vllm.step_metadata import DownMessage, Offer, decode_down, decoded, encode_up


class RankStub:
    """One rank's half in its worker. Its own thread goes on between steps: `port` is fed whenever something arrives.

    Args: `do` carries out what the rank's endpoint wants, by (address, effect).
    """

    def __init__(self, port: Port, do: Callable[[Address, Any], None], clock: Callable[[], Instant]) -> None:
        self.core = Core()
        self.port = port
        self.clock = clock
        self.up: list[tuple[Address, Any]] = []
        self.failed: tuple[str, ...] = ()
        self.answers = False
        self.words: dict[int, int] = {}
        """Lease words that have been exposed, by index."""
        self.offers: list[Offer] = []
        """What may be sent once this step has computed it."""
        self.offered: dict[str, int] = {}
        """How many pieces of each prompt may be sent."""
        self.core.add(port)
        self.carry_out = do

    def does(self, kinds: tuple[type, ...]) -> None:
        """Effects of these kinds are carried out by this worker's transport."""
        self.core.do.update(dict.fromkeys(kinds, self.do))
        self.core.do[SendLocal] = self.send_local

    def do(self, port: Port, effect: Any) -> None:
        self.carry_out(port.address, effect)

    def send_local(self, _: Port, effect: SendLocal) -> None:
        self.up.append((effect.to, effect.event))

    def feed(self, event: Any) -> None:
        self.core.feed(self.port, event, self.clock())

    def wake_at(self) -> Instant:
        endpoint: Any = self.port.endpoint
        at: Instant | None = endpoint.wake_at()
        return NEVER if at is None else at

    # Hooks, in the order of a step.

    def bind_metadata(self, payload: bytes | None, failed: tuple[str, ...]) -> None:
        self.failed += failed
        self.answers = payload is not None
        message = DownMessage() if payload is None else decode_down(payload)
        self.offers = message.offers
        for xid in message.withdrawn:
            self.offered.pop(xid, None)
        for event in message.events:
            if event.to == self.port.address:
                order = decoded(event)
                if type(order) is SourceReady and order.source.lease_word is not None:
                    self.words[order.source.lease_word.index] = order.source.lease_word.value
                self.feed(order)

    def layer_computed(self, layer: str, mark: Any) -> None:
        """Offered with the whole step: whether it is sooner makes no difference to an endpoint."""

    def step_computed(self, mark: Any) -> None:
        for offer in self.offers:
            self.offered[offer.xid] = self.offered.get(offer.xid, 0) + 1
        self.offers = []

    def take_failed(self) -> set[str]:
        failed, self.failed = self.failed, ()
        return set(failed)

    def take_up(self) -> bytes | None:
        up, self.up = self.up, []
        return encode_up(rank_of(self.port.address), up) if up or self.answers else None
