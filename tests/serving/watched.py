"""What both adapters look at in the same way: events that a node gives its endpoints, and memory beside the blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

from pdflow.methods.method import MemoryKind, Method
from pdflow.methods.staging import KvSize, PagedStaging, RingStaging, Staging
from pdflow.methods.store.memory import Item, Placed, StoreMemory
from pdflow.protocol import events
from pdflow.protocol.ids import KvParams
from pdflow.protocol.messages import Code
from pdflow.protocol.values import Allocation, Instant
from tests.serving.script import Call
from tests.serving.setting import BLOCK, LAYERS

Record: TypeAlias = Callable[[Call], None]

PAGES: Final = 4
"""Beside the blocks, each as large as one: the longest prompt takes three, so others wait for it."""
REPORTED_EVENTS: Final = (
    events.DecodeQueued,
    events.DecodeAdmitted,
    events.DecodeHit,
    events.DecodeAborted,
    events.PrefillQueued,
    events.PrefillBegun,
    events.PrefillFinished,
    events.PrefillAborted,
    events.SourceWithdrawn,
)
"""What a node tells its schedulers' endpoints: everything else there comes from ranks and from time."""


def watch(record: Record) -> Callable[[str, Any, tuple[Any, ...], Instant], None]:
    """An observer of a node's endpoints."""

    def observe(address: str, event: Any, effects: tuple[Any, ...], now: Instant) -> None:
        if isinstance(event, REPORTED_EVENTS) and ".r" not in address:
            fields = {name: getattr(event, name) for name in event.__struct_fields__}
            subject = fields.pop("request_id", None) or fields.pop("xid")
            record(Call("tell", str(subject), (type(event).__name__, *fields.values())))

    return observe


def staging_in(memory: MemoryKind, method: Method, ranks: int) -> Staging:
    """Memory beside the blocks of one rank: the same kind in both worlds, and small."""
    size = KvSize(LAYERS, 16 // ranks)
    if memory is MemoryKind.RING:
        layer_bytes = size.bytes_per_token * BLOCK
        return RingStaging.of_bytes(size, PAGES * LAYERS * layer_bytes, layer_bytes, BLOCK)
    return PagedStaging(size, BLOCK, PAGES, evicts=memory is MemoryKind.STORE)


def recorded(staging: Staging, record: Record) -> Staging:
    """The same memory, which records what is asked of it."""
    owner: dict[int, str] = {}
    enqueue, admit_next, forget, release = staging.enqueue, staging.admit_next, staging.forget, staging.release

    def recorded_enqueue(name: str, num_tokens: int) -> None:
        record(Call("enqueue for room", name, (num_tokens,)))
        enqueue(name, num_tokens)

    def admitted() -> tuple[str, Allocation] | None:
        found = admit_next()
        if found is not None:
            owner[found[1].generation] = found[0]
            record(Call("take room", found[0], (found[1].generation,)))
        return found

    def forgotten(name: str) -> bool:
        waited = forget(name)
        if waited:
            record(Call("want no room", name))
        return waited

    def released(allocation: Allocation) -> None:
        record(Call("give room back", owner.get(allocation.generation, "nobody"), (allocation.generation,)))
        release(allocation)

    staging.enqueue, staging.admit_next = recorded_enqueue, admitted  # type: ignore[method-assign]
    staging.forget, staging.release = forgotten, released  # type: ignore[method-assign]
    return staging


def recorded_memory(memory: StoreMemory, record: Record) -> StoreMemory:
    """A store's memory, which records what is asked of it."""
    owner: dict[int, str] = {}
    enqueue, admit_waiting, forget, release = memory.enqueue, memory.admit_waiting, memory.forget, memory.release

    def recorded_enqueue(name: str, items: tuple[Item, ...]) -> None:
        record(Call("enqueue for room", name, tuple(item.key for item in items)))
        enqueue(name, items)

    def admitted(now: Instant) -> list[Placed]:
        found = admit_waiting(now)
        for placed in found:
            owner[placed.target.generation] = placed.name
            record(Call("take room", placed.name, (placed.target.generation, placed.found_blocks)))
        return found

    def forgotten(name: str) -> bool:
        waited = forget(name)
        if waited:
            record(Call("want no room", name))
        return waited

    def released(generation: int, now: Instant) -> None:
        record(Call("give room back", owner.get(generation, "a look"), (generation,)))
        release(generation, now)

    memory.enqueue, memory.admit_waiting = recorded_enqueue, admitted  # type: ignore[method-assign]
    memory.forget, memory.release = forgotten, released  # type: ignore[method-assign]
    return memory


def lookup_answer(request_id: str, params: KvParams | None) -> Call:
    """Who asked what a store has of a prompt hears it."""
    return Call("found" if params is not None else "nothing found", request_id, () if params is None else (params,))


def answer(request_id: str, code: Code, params: KvParams | None = None) -> Call:
    """Who asked is told how its leg ended."""
    return Call("answer", request_id, (code.name, *(() if params is None else (params,))))
