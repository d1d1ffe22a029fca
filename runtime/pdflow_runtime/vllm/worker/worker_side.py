"""The half of the connector in one vLLM worker: the thread in which its rank lives, and vLLM's hooks.

vLLM's thread hands over what came with a step and takes what is to go with its output. In a step that computes nothing
it waits up to 2 ms for something to take, otherwise never.
Registrations, cancels, DONE, fences and leases go on in the rank's thread during long steps.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import trio

from pdflow.protocol.values import Address
from pdflow_runtime.nodes.rank_memory import AdoptedMemory
from pdflow_runtime.observe.transfer_samples import TransferSamples
from pdflow_runtime.security.tls import Tls
from pdflow_runtime.transports.base import MakeTransport
from pdflow_runtime.vllm.events_file import events_file
from pdflow_runtime.vllm.instance import Instance
from pdflow_runtime.vllm.options import UnsupportedError
from pdflow_runtime.vllm.security import shared_secret
from pdflow_runtime.vllm.step_metadata import Offer, decode_down, encode_up
from pdflow_runtime.vllm.worker.rank_node import RankNode

log = logging.getLogger(__name__)

START_S: Final = 30.0
"""The time that a rank's thread has to listen."""
STOP_S: Final = 10.0
MOST_WAIT_S: Final = 0.002
"""How long a step that computes nothing waits for something to report. vLLM steps again and again while a transfer is
open, with 1 ms of sleep between: waiting here ends with the event, and leaves the cores to others meanwhile. A request
that arrives waits for it."""


Mark: TypeAlias = Callable[[], Callable[[], None] | None]
"""Marks what has been launched on the device so far, and returns a function that waits until it is computed; None if it
is already."""


class WorkerSide:
    """One rank's half in its worker. Args: `rank`, its number; `incarnation`, the same for all ranks."""

    def __init__(self, instance: Instance, rank: int, incarnation: int) -> None:
        self.instance: Final = instance
        self.rank: Final = rank
        self.incarnation: Final = incarnation
        self.address: tuple[str, int] | None = None
        """Where the rank listens, once it does."""
        self.samples: Final = TransferSamples()
        self._node: RankNode
        self._token: trio.lowlevel.TrioToken | None = None
        self._scope: Final = trio.CancelScope()
        self._started: Final = threading.Event()
        self._error: BaseException | None = None
        """What has ended the rank's thread."""
        self._thread: threading.Thread | None = None
        self._failed: tuple[str, ...] = ()
        self._layers: dict[str, int] = {}
        self._offers: dict[int, list[Offer]] = {}
        """By layer, what may be sent once this step has computed it."""
        self._answers = False
        """The scheduler's half waits for an answer to this step, though there may be nothing to say."""
        self._waits = False
        """This step computes nothing, and may wait for something to report."""

    # The thread.

    def start(
        self, memory: AdoptedMemory, transport: MakeTransport, layers: tuple[str, ...], tls: Tls | None = None
    ) -> None:
        """Start the rank over this memory. `layers`: their names, in the order of the model; `tls`, by which its frames
        go. UnsupportedError if it cannot listen or cannot have the memory."""
        self._layers = {name: number for number, name in enumerate(layers)}
        self._thread = threading.Thread(target=self._run, args=(memory, transport, tls), name="pdflow", daemon=True)
        self._thread.start()
        if not self._started.wait(START_S):
            raise UnsupportedError(f"rank {self.rank} of pdflow's connector did not start within {START_S:.0f} s")
        if self._error is not None:
            raise UnsupportedError(f"rank {self.rank} of pdflow's connector failed to start: {self._error}")

    def _run(self, memory: AdoptedMemory, transport: MakeTransport, tls: Tls | None) -> None:
        try:
            trio.run(self._serve, memory, transport, tls)
        except BaseException as error:
            self._error = error
            log.exception(
                "pdflow: the thread of rank %d has failed; the connector moves no KV until the instance restarts",
                self.rank,
            )
        finally:
            self._started.set()

    async def _serve(self, memory: AdoptedMemory, transport: MakeTransport, tls: Tls | None) -> None:
        options, port = self.instance.options, self.instance.options.port
        if port:
            port += self.instance.dp_rank * self.instance.info.shards.ranks + self.rank
        node = self._node = RankNode(self.instance, self.rank, self.incarnation, memory, transport)
        node.sampled_by(self.samples)
        node.secured_by(shared_secret(options.host), tls)
        (listener,) = await trio.open_tcp_listeners(port, host=options.host)
        self.address = (options.host, listener.socket.getsockname()[1])
        self._token = trio.lowlevel.current_trio_token()
        file = events_file(self.instance, self.incarnation, node.address)
        if file is not None:
            node.observe = file.observe
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    await nursery.start(node.serve, listener)
                    self._started.set()
        finally:
            with trio.move_on_after(STOP_S, shield=True):
                await node.aclose()
            if file is not None:
                file.close()

    def _in_thread(self, function: Callable[..., Any], *args: Any) -> None:
        """Call a function in the rank's thread, soon, unless it has ended."""
        if self._error is None and self._token is not None:
            try:
                self._token.run_sync_soon(function, *args)
            except trio.RunFinishedError:
                log.debug("rank %d has ended", self.rank)

    def stop(self) -> None:
        """End the rank's thread, and wait until nothing moves in its memory any more."""
        self._in_thread(self._scope.cancel)
        if self._thread is not None:
            self._thread.join(STOP_S)

    # Hooks, in the order of a step.

    def bind_metadata(self, payload: bytes | None, failed: tuple[str, ...]) -> None:
        """Take what came with a step, before the model computes. `failed`: loads to be reported as failed."""
        self._failed += failed
        self._answers = payload is not None
        message = None if payload is None else decode_down(payload)
        self._waits = message is not None and message.waits
        self._offers = {}
        for offer in () if message is None else message.offers:
            self._offers.setdefault(offer.layer, []).append(offer)
        self._node.stepping = True
        self._in_thread(self._node.receive, message)

    def layer_computed(self, layer: str, mark: Mark) -> None:
        """Offer what this step computes of a layer, whose computation has been launched."""
        number = self._layers.get(layer)
        if self.instance.options.progressive and number in self._offers:
            self._offer(self._offers.pop(number), mark)

    def step_computed(self, mark: Mark) -> None:
        """Offer what is left of what this step computes."""
        if self._offers:
            self._offer([offer for offers in self._offers.values() for offer in offers], mark)
            self._offers = {}

    def _offer(self, offers: list[Offer], mark: Mark) -> None:
        self._in_thread(self._node.offer_when_computed, offers, mark())

    def take_failed(self) -> set[str]:
        failed, self._failed = self._failed, ()
        return set(failed)

    def take_up(self) -> bytes | None:
        """Return what goes to the scheduler's half with this step's output; None if there is nothing, and it waits for
        nothing."""
        if self._waits and self._error is None:
            self._node.outbox.wait(MOST_WAIT_S)
        self._node.stepping = False
        events: list[tuple[Address, Any]] = self._node.outbox.take()
        if not events and not self._answers and self._error is None:
            return None
        return encode_up(self.rank, events, "" if self._error is None else repr(self._error))
