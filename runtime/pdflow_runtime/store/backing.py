"""The copy of a store node's objects in a server beside it (`store/server.py`), which outlives the node.

Objects that are put into the node are written to the server afterwards; an object that is looked up and is not in the
node is read from the server, and then found in the node like any other. No request waits for the server longer than
LOOKED_S, or fails because of it: what cannot be written is written when it is put the next time, and what is not there
in time, or is not what was put there, is computed.

The node's memory decides what is evicted for it (`pdflow/methods/store/ledger.py`); `store/values.py` has the format.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias, TypeVar

import msgspec
import trio

from pdflow.methods.store.keys import Key
from pdflow.methods.store.ledger import StoreLedger
from pdflow.methods.store.memory import Item
from pdflow.protocol.values import Instant, S
from pdflow_runtime.clock import now_ns
from pdflow_runtime.store.server import RefusedError, ServerError, ValueServer
from pdflow_runtime.store.values import HEADER_BYTES, BadValueError, Cells, ValueFormat

log = logging.getLogger(__name__)
T = TypeVar("T")

LOOKED_S: Final = 1.0
"""The time limit of all that one lookup asks of the server; the engine waits for twice as long
(`store_calls.LOOK_S`)."""
WATCHED_S: Final = 2.0
"""The interval of checks whether the server is there; and how long nothing is sent to one that has refused."""
MOST_WAITING: Final = 1 << 14
"""The most objects that wait to be written. Only names wait: the bytes are in the node's memory."""
BATCH_BYTES: Final = 8 << 20
BATCH: Final = 64
"""The most objects that are asked for, or written, at once."""
READERS: Final = 4
"""The number of threads that read; one more writes."""

Batch: TypeAlias = list[tuple[Key, bytearray]]


class BackingState(msgspec.Struct, frozen=True):
    """The state for people. `objects`: how many were saved, found, missed (lookups that ended where nothing was), bad,
    dropped (not saved: too many waited, or they were evicted first, or the server was gone), refused, late (lookups
    that were)."""

    server: str
    up: bool
    waiting: int
    objects: dict[str, int]


class Backing:
    """The copy of a node's objects in a server. Args: `server` is to have what `ledger` knows and `cells` hold: objects
    of `unit_tokens`. An object is written anew when `renew_s` are over, as the server drops it some time after."""

    def __init__(
        self,
        server: ValueServer,
        ledger: StoreLedger,
        cells: Cells,
        form: ValueFormat,
        unit_tokens: int,
        renew_s: float,
    ) -> None:
        self.name: Final = f"store server {server.name}"
        self.server: Final = server
        self.up = True
        """True if the server serves, as far as is known."""
        self.counts: Final = Counter[str](saved=0, found=0, missed=0, bad=0, dropped=0, refused=0, late=0)
        self._ledger: Final = ledger
        self._cells: Final = cells
        self._form: Final = form
        self._unit_tokens: Final = unit_tokens
        self._renew_ns: Final = int(renew_s * S)
        self._saved: dict[Key, Instant] = {}
        """Objects that are written, or going to be, and until when that holds."""
        self._waiting = 0
        self._to_save, self._unsaved = trio.open_memory_channel[Key](MOST_WAITING)
        self._refusing_until: Instant = 0
        self._warned: set[str] = set()
        self._reading: Final = trio.CapacityLimiter(READERS)
        self._writing: Final = trio.CapacityLimiter(1)

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch)
            nursery.start_soon(self._write)

    def state(self) -> BackingState:
        return BackingState(self.server.name, self.up, self._waiting, dict(self.counts))

    def is_drained(self) -> bool:
        """True if all that can be written is."""
        return not self._waiting

    # Whether it is there.

    async def _watch(self) -> None:
        run_id = None
        while True:
            try:
                current = await self._call(self.server.run_id, self._reading)
            except ServerError as error:
                self._lost(error)
            else:
                if not self.up:
                    log.info("%s answers again", self.name)
                if run_id is not None and current != run_id:
                    log.info("%s was restarted; objects are written to it again", self.name)
                    self._saved.clear()
                self.up, run_id = True, current
            await trio.sleep(WATCHED_S)

    def _lost(self, error: ServerError) -> None:
        if self.up:
            log.warning("%s is unavailable: %s; requests continue without it", self.name, error)
        self.up = False

    async def _call(self, call: Callable[[], T], limiter: trio.CapacityLimiter) -> T:
        """Run a call in a thread. A cancelled caller leaves it to end by itself, and its place in `limiter` taken until
        then."""
        return await trio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=limiter)

    def _warn_once(self, kind: str, text: str) -> None:
        """Log a warning once for each kind, until the cause is over: a peer may cause as many as it likes."""
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning("%s %s", self.name, text)

    # Writing behind.

    def save(self, items: tuple[Item, ...], tokens: int) -> None:
        """Queue objects that are complete in the node to be written. The rest of a prompt behind its last unit is left
        out, as it is never looked up."""
        now = now_ns()
        for item in items[: tokens // self._unit_tokens]:
            if self._saved.get(item.key, 0) > now:
                continue
            try:
                self._to_save.send_nowait(item.key)
            except trio.WouldBlock:
                self.counts["dropped"] += 1
            else:
                self._saved[item.key] = now + self._renew_ns
                self._waiting += 1
        if len(self._saved) > 2 * (len(self._ledger.memory.known) + MOST_WAITING):
            known = self._ledger.memory.known
            self._saved = {key: until for key, until in self._saved.items() if key in known}

    async def _write(self) -> None:
        async for key in self._unsaved:
            batch = [(key, value)] if (value := self._copied(key)) is not None else []
            while len(batch) < BATCH and sum(len(value) for _, value in batch) < BATCH_BYTES:
                try:
                    key = self._unsaved.receive_nowait()
                except trio.WouldBlock:
                    break
                if (value := self._copied(key)) is not None:
                    batch.append((key, value))
            if batch:
                await self._put(batch)

    def _copied(self, key: Key) -> bytearray | None:
        """Copy an object's KV into a value, its header left empty; None if it cannot be written. Copied at once: the
        memory's objects may be evicted at any time."""
        stored = self._ledger.memory.known.get(key)
        refusing = self._refusing_until > now_ns()
        if stored is None or not self.up or refusing:
            self._not_saved([key], "refused" if refusing else "dropped")
            return None
        value = bytearray(self._form.nbytes(len(stored.own.blocks)))
        self._cells.copy_out(stored.own.blocks, memoryview(value)[HEADER_BYTES:])
        return value

    async def _put(self, batch: Batch) -> None:
        def put() -> None:
            for key, value in batch:
                self._form.seal(key, value)
            self.server.put([(self._form.name(key), memoryview(value)) for key, value in batch])

        keys = [key for key, _ in batch]
        try:
            await self._call(put, self._writing)
        except RefusedError as error:
            self._warn_once("refused", f"rejects writes: {error}; requests continue without it")
            self._refusing_until = now_ns() + int(WATCHED_S * S)
            self._not_saved(keys, "refused")
        except ServerError as error:
            self._lost(error)
            self._not_saved(keys, "dropped")
        else:
            self._warned.discard("refused")
            self._waiting -= len(keys)
            self.counts["saved"] += len(keys)

    def _not_saved(self, keys: Sequence[Key], why: str) -> None:
        self._waiting -= len(keys)
        self.counts[why] += len(keys)
        for key in keys:
            self._saved.pop(key, None)

    # Looking for what the node has not.

    async def fetch(self, items: tuple[Item, ...]) -> None:
        """Bring the missing ones of these into the node, from the first on, as far as the server has them and there is
        room."""
        memory = self._ledger.memory
        at = memory.find(items)
        with trio.move_on_after(LOOKED_S) as scope:
            while self.up and at < len(items):
                batch = self._next(items[at:])
                try:
                    found = await self._get(batch)
                except ServerError as error:
                    self._lost(error)
                    return
                if not self._bring(items[: at + len(found)], at, found) or len(found) < len(batch):
                    return
                at += len(batch)
        self.counts["late"] += scope.cancelled_caught

    def _next(self, items: tuple[Item, ...]) -> tuple[Item, ...]:
        """Return as many of these as are asked for at once."""
        count = size = 0
        for item in items[:BATCH]:
            size += self._form.nbytes(item.blocks)
            if count and size > BATCH_BYTES:
                break
            count += 1
        return items[:count]

    async def _get(self, batch: tuple[Item, ...]) -> list[memoryview]:
        """Return the KV of these, up to the first that is not there, or is not what was put there."""

        def get() -> tuple[list[memoryview], str | None]:
            values = self.server.get([(form.name(item.key), form.nbytes(item.blocks)) for item in batch])
            found: list[memoryview] = []
            for item, value in zip(batch, values, strict=True):
                if not value:
                    break
                try:
                    found.append(form.opened(item.key, item.blocks, value))
                except BadValueError as error:
                    return found, str(error)
            return found, None

        form = self._form
        found, bad = await self._call(get, self._reading)
        if bad is not None:
            self.counts["bad"] += 1
            self._warn_once(bad, f"returned a bad value for {form.name(batch[len(found)].key)}, which {bad}; ignored")
        elif len(found) < len(batch):
            self.counts["missed"] += 1
        return found

    def _bring(self, items: tuple[Item, ...], at: int, found: Sequence[memoryview]) -> bool:
        """Put what follows the first `at` of these into the node's memory. False if there is no room."""
        ledger, now = self._ledger, now_ns()
        here = ledger.memory.find(items)
        if here < at:
            return False  # evicted meanwhile
        room = ledger.bring(items, now)
        if room is None:
            return False
        start = 0
        for item, kv in zip(items[here:], found[here - at :], strict=True):
            self._cells.copy_in(room.blocks[start : start + item.blocks], kv)
            start += item.blocks
            self._saved[item.key] = now + self._renew_ns
        ledger.brought(room.generation, now)
        self.counts["found"] += len(items) - here
        return True
