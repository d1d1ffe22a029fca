"""The half of the connector in EngineCore, for both roles: hooks become events, effects become what hooks return.

Nothing here decides about a request: that is the core's (`pdflow/serving`) and the endpoint's. What is kept is what
vLLM's side of a hook needs: which report vLLM waits for (`ledger.py`), and what goes to the workers with the next step.

The endpoint is called in vLLM's own thread, within a hook. Workers' events come up with a step's output; deadlines are
judged behind them (C11), and by a clock that counts only the time in which the engine ran (`engine_clock.py`).
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from typing import Any, Final, Generic, TypeVar

from pdflow.protocol.effects import Note, SendLocal
from pdflow.protocol.events import TimeReached
from pdflow.protocol.values import Address, Allocation, BlockTables, Instant, Xid, allocation_of
from pdflow.serving.core import Port
from pdflow.serving.decode import DecodeCore
from pdflow.serving.prefill import PrefillCore
from pdflow_runtime.observe.transfer_samples import TransferSamples
from pdflow_runtime.vllm.events_file import events_file
from pdflow_runtime.vllm.instance import Instance
from pdflow_runtime.vllm.scheduler.block_references import BlockReferences
from pdflow_runtime.vllm.scheduler.ledger import LoadLedger
from pdflow_runtime.vllm.step_metadata import (
    MOST_EVENTS,
    DownMessage,
    Offer,
    UpMessage,
    decoded,
    encode_down,
    encoded,
)

log = logging.getLogger(__name__)

TIME_REACHED: Final = TimeReached()


C = TypeVar("C", PrefillCore, DecodeCore)


class SchedulerSide(Generic[C]):
    """One role's half in EngineCore.

    Args: `core` of the role; `endpoint` of the engine's scheduler; `incarnation` that all its ranks have; `weights`
    that KV is computed with; `clock`: what time it is.
    """

    def __init__(
        self,
        instance: Instance,
        core: C,
        endpoint: Any,
        incarnation: int,
        weights: int,
        clock: Callable[[], Instant],
    ) -> None:
        self.instance: Final = instance
        self.core: Final[C] = core
        self.port: Final = Port(instance.info.engine, endpoint, incarnation)
        self.endpoint: Final = endpoint
        self.weights = weights
        self.clock: Final = clock
        self.ledger: Final = LoadLedger()
        self.references: Final = BlockReferences()
        """On blocks that the protocol has: grants at D, prompts that are sent from at P."""
        self.samples: Final = TransferSamples()
        self.notes: Final[Counter[str]] = Counter()
        self.pool: Any = None
        """vLLM's BlockPool."""
        self.block_tables: Callable[[str], BlockTables] = lambda _: []
        """Returns the blocks that vLLM has allocated for a request."""
        self._events: Final[deque[tuple[Address, Any]]] = deque()
        """Events for ranks' endpoints, which go down with the next steps."""
        self._addresses: Final[dict[Address, tuple[str, int]]] = {}
        self.offers: Final[list[Offer]] = []
        self.withdrawn: Final[list[Xid]] = []
        self._generation = 0
        core.add(self.port)
        self._file: Final = events_file(instance, incarnation, instance.info.engine)
        if self._file is not None:
            write = self._file.observe
            core.observe = lambda port, event, effects, now: write(port.address, event, effects, now)
        core.do.update({SendLocal: self._send_local, Note: self._note})

    # Effects.

    def _send_local(self, _: Port, effect: SendLocal) -> None:
        self._events.append((effect.to, effect.event))

    def _note(self, port: Port, effect: Note) -> None:
        self.notes[effect.name] += 1
        if self.notes[effect.name] == 1:
            log.info("%s: note: %s (further ones are only counted)", port.address, effect.name)

    def ignore(self, _: Port, effect: Any) -> None:
        """An effect that is for the record."""

    # What both roles' hooks use.

    def feed(self, event: Any) -> None:
        """Hand an event to the rules of the role, with all that follows from it."""
        self.core.feed(self.core.role, event, self.clock())

    def allocation(self, tables: BlockTables) -> Allocation:
        """Return these blocks under a generation of their own: vLLM's have none."""
        self._generation += 1
        return allocation_of(self._generation, tables)

    def note_addresses(self, addresses: Iterable[tuple[Address, tuple[str, int]]]) -> None:
        """Have ranks learn where other ranks listen, before the events that follow."""
        self._addresses.update(addresses)

    def blocks_of(self, num_tokens: int) -> int:
        """Return how many blocks hold so many tokens."""
        return -(-num_tokens // self.instance.info.shards.block_size)

    # Hooks.

    def bind(self, pool: Any, block_tables: Callable[[str], BlockTables]) -> None:
        """Attach vLLM's block pool, and the function that returns a request's block tables."""
        self.pool, self.block_tables = pool, block_tables

    def on_new_request(self, request: Any) -> None:
        raise NotImplementedError

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Return how many tokens vLLM is to load behind the `computed` ones; None: it asks again in its next step."""
        return 0, False

    def update_state_after_alloc(self, request: Any, tables: BlockTables, external: int) -> None:
        """Take note of a request's block tables, when so many of its tokens are to be loaded."""

    def request_finished(self, request: Any, tables: BlockTables) -> dict[str, Any] | None:
        """Take note that vLLM is done with a request, and return the parameters for its client."""
        raise NotImplementedError

    def take_failed(self) -> tuple[str, ...]:
        """Return the loads that the workers are to report as failed with this step."""
        return ()

    def step_scheduled(self, scheduled: Mapping[str, int]) -> None:
        """Take note of what the next step computes: so many tokens of each request."""

    def take_down(self, scheduled: Mapping[str, int]) -> bytes | None:
        """Return what goes to the ranks with a step that computes so many tokens of each request; None if there is
        nothing to send and nothing is open."""
        self.step_scheduled(scheduled)
        is_open = bool(self.endpoint.unfinished())
        if not (self.has_orders() or is_open or len(self.ledger)):
            return None
        addresses = [(name, host, port) for name, (host, port) in self._addresses.items()]
        events = [self._events.popleft() for _ in range(min(MOST_EVENTS, len(self._events)))]
        message = DownMessage(
            events=[encoded(to, event) for to, event in events],
            addresses=addresses,
            offers=self.offers,
            withdrawn=self.withdrawn,
            open=is_open,
            waits=not scheduled and not self.instance.in_lockstep,
        )
        payload = encode_down(message)
        for sent in (self._addresses, self.offers, self.withdrawn):
            sent.clear()
        return payload

    def has_orders(self) -> bool:
        """Whether something waits to go to the ranks."""
        return bool(self._events or self._addresses or self.offers or self.withdrawn)

    def update_failed(self, failed: set[str]) -> set[str]:
        """Handle the workers' reports of failed loads, and return those of which vLLM waits for none."""
        return set(failed)

    def take_up(self, messages: list[UpMessage]) -> None:
        """Handle what the ranks have sent with a step's output, and then, if all of them have, what is due."""
        now = self.clock()
        for message in sorted(messages, key=lambda message: message.rank):
            for event in message.events:
                self.core.feed(self.port, decoded(event), now)
        if len(messages) == self.instance.info.shards.ranks:
            at = self.endpoint.wake_at()
            if at is not None and at <= now:
                self.core.feed(self.port, TIME_REACHED, now)

    def reset(self) -> None:
        """Take note that vLLM has given up its caches, as it does before the model gets other weights, of which it says
        nothing: KV of before and after is never exchanged. Instances exchange KV again when all of them have been reset
        as many times."""
        digest = blake2b(self.weights.to_bytes(8, "little"), digest_size=8, person=b"vLLM reset").digest()
        self.weights = int.from_bytes(digest, "little") >> 1
        self.core.set_weights(self.weights)
        log.info(
            "pdflow: vLLM reset its caches; weights are now %016x; KV moves only between instances reset as often",
            self.weights,
        )

    def has_pending_work(self) -> bool:
        """Whether the engine must go on stepping though vLLM has no request to compute. Requests without blocks are
        vLLM's: a pause, in which it computes none of them, would never end for their sake."""
        return bool(self.has_orders() or len(self.references) or len(self.ledger))

    def close(self) -> None:
        """Close the events file, if there is one."""
        if self._file is not None:
            self._file.close()

    def assert_empty(self) -> None:
        """Assert, at rest, that nothing of any request is kept."""
        kept = (self.has_orders(), len(self.ledger), len(self.references), self.endpoint.unfinished())
        assert not any(kept), f"{self.port.address} still holds {kept}"
