"""What is kept of a store's node in a server beside it: what is written when, what is looked for, and that a server
which is gone, full, slow or lies costs nobody anything. The server here is a dict; `test_store_outlived.py` has real
ones."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from pdflow.layout.descriptors import rank_memory
from pdflow.layout.shapes import KvShape
from pdflow.methods.store.ledger import StoreLedger
from pdflow.methods.store.memory import Item, StoreMemory
from pdflow_runtime.store import backing as store_backing
from pdflow_runtime.store.backing import Backing
from pdflow_runtime.store.server import RefusedError, ServerError, ValueServer
from pdflow_runtime.store.values import Cells, ValueFormat, layout_of

SHAPE = KvShape(2, 2, head_dim=2, bytes_per_value=2, block_size=4)
UNIT = 8
"""Tokens of an object: two blocks."""
RENEW_S = 100.0


class DictServer:
    """Keeps values; `ails` is what is wrong with it."""

    name = "dict://here"

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.runs = 1
        self.asked = self.puts = self.looks = 0
        self.ails: ServerError | None = None
        self.answers = threading.Event()
        self.answers.set()

    def run_id(self) -> str:
        self.looks += 1
        if self.ails is not None and not isinstance(self.ails, RefusedError):
            raise self.ails
        return str(self.runs)

    def get(self, requested: Sequence[tuple[str, int]]) -> list[bytes]:
        self.asked += len(requested)
        self.answers.wait(20)
        if self.ails is not None and not isinstance(self.ails, RefusedError):
            raise self.ails
        return [self.values.get(name, b"")[: nbytes + 1] for name, nbytes in requested]

    def put(self, values: Sequence[tuple[str, memoryview]]) -> None:
        self.puts += len(values)
        self.answers.wait(20)
        if self.ails is not None:
            raise self.ails
        self.values.update((name, bytes(value)) for name, value in values)

    def close(self) -> None: ...


class BackedMemory:
    """One life of a node's memory, without the node, beside a server."""

    def __init__(self, server: ValueServer, blocks: int = 20) -> None:
        memories = [rank_memory(SHAPE, blocks, 2) for _ in range(2)]
        nbytes = blocks * SHAPE.block_size * SHAPE.bytes_per_token // 2
        self.regions = [bytearray(nbytes) for _ in memories]
        self.cells = Cells(list(zip(map(memoryview, self.regions), memories, strict=True)))
        self.memory = StoreMemory(blocks, keeps=True, high_water=1.0)
        self.notes = Counter[str]()
        self.ledger = StoreLedger(self.memory, SHAPE.block_size, lambda what, number: self.notes.update({what: number}))
        form = ValueFormat(layout_of("tiny", SHAPE, memories), self.cells.block_bytes, None)
        self.backing = Backing(server, self.ledger, self.cells, form, UNIT, RENEW_S)

    def put(self, items: tuple[Item, ...], tail: int = 0) -> None:
        """A prompt is committed here, whose KV one knows by its keys; and as many tokens behind them."""
        behind = (Item(f"behind {items}", -(-tail // SHAPE.block_size)),) if tail else ()
        self.memory.enqueue("p", (*items, *behind))
        (placed,) = self.memory.admit_waiting(0)
        found = self.memory.find(items)
        blocks = list(placed.target.blocks)
        for item in items[found:]:
            self.cells.copy_in([blocks.pop(0) for _ in range(item.blocks)], memoryview(self.kv(item)))
        self.ledger.brought(placed.target.generation, 0)
        self.backing.save((*items, *behind), UNIT * len(items) + tail)

    def kv(self, item: Item) -> bytes:
        return (item.key.encode() * self.cells.block_bytes)[: item.blocks * self.cells.block_bytes]

    def has(self, items: tuple[Item, ...]) -> int:
        """How many are here, from the first on, and are what was put."""
        found = self.memory.find(items)
        for item in items[:found]:
            kv = bytearray(item.blocks * self.cells.block_bytes)
            self.cells.copy_out(self.memory.known[item.key].own.blocks, memoryview(kv))
            assert kv == self.kv(item)
        return found

    async def saved(self) -> None:
        await until(self.backing.is_drained)


async def until(so: Callable[[], Any]) -> None:
    with trio.fail_after(10):
        while not so():
            await trio.sleep(0.002)


@asynccontextmanager
async def backed_memory(server: ValueServer, blocks: int = 20) -> AsyncIterator[BackedMemory]:
    node = BackedMemory(server, blocks)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.backing.run)
        yield node
        nursery.cancel_scope.cancel()
    node.ledger.assert_empty("the node")


def chain(count: int, name: str = "a") -> tuple[Item, ...]:
    return tuple(Item(f"{name}{number}", 2) for number in range(count))


@pytest.fixture
def server() -> DictServer:
    return DictServer()


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_backing, "WATCHED_S", 0.01)


@pytest.mark.trio
async def test_objects_are_found_after_a_restart(server: DictServer) -> None:
    async with backed_memory(server) as node:
        node.put(chain(4))
        await node.saved()
        assert node.backing.counts["saved"] == 4
        asked = server.asked
        await node.backing.fetch(chain(4))
        assert server.asked == asked, "what is here is not looked for there"
    async with backed_memory(server) as node:
        await node.backing.fetch(chain(6))
        assert node.has(chain(6)) == 4
        assert (node.backing.counts["found"], node.backing.counts["missed"]) == (4, 1)
        node.put(chain(6))
        await node.saved()
        assert server.puts == 6, "what has come from there is not written there again"
        assert node.has(chain(6)) == 6


@pytest.mark.trio
async def test_what_is_behind_the_last_unit_is_not_written(server: DictServer) -> None:
    async with backed_memory(server) as node:
        node.put(chain(2), tail=5)
        await node.saved()
        assert len(server.values) == 2


@pytest.mark.trio
async def test_a_long_prompt_is_brought_in_batches(server: DictServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async with backed_memory(server) as node:
        node.put(chain(9))
        await node.saved()
    for name, limit in (("BATCH", 2), ("BATCH_BYTES", 1)):
        monkeypatch.setattr(store_backing, name, limit)
        async with backed_memory(server) as node:
            await node.backing.fetch(chain(9))
            assert node.has(chain(9)) == 9


@pytest.mark.trio
async def test_the_memory_limits_how_much_comes_back(server: DictServer) -> None:
    async with backed_memory(server) as node:
        node.put(chain(9))
        await node.saved()
    async with backed_memory(server, blocks=8) as node:
        await node.backing.fetch(chain(9))
        assert node.has(chain(9)) == 0, "a prompt that never fits is not brought in parts"
        await node.backing.fetch(chain(4))
        assert node.has(chain(9)) == 4
        await node.backing.fetch(chain(1, "b"))
        node.memory.enqueue("long", (Item("x", 8),))
        held = node.memory.admit_waiting(0)[0].target.generation
        assert node.notes["store: objects evicted"] == 0
        node.memory.enqueue("waits", (Item("y", 2),))
        assert node.memory.admit_waiting(0) == []
        await node.backing.fetch(chain(1))
        assert node.has(chain(1)) == 0, "who waits for room is not overtaken"
        node.memory.forget("waits")
        node.memory.release(held, 0)
        await node.backing.fetch(chain(1))
        assert node.has(chain(1)) == 1


@pytest.mark.trio
async def test_what_is_evicted_while_more_is_asked_for_is_no_harm(
    server: DictServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with backed_memory(server) as node:
        node.put(chain(3))
        await node.saved()
    monkeypatch.setattr(store_backing, "BATCH", 1)
    async with backed_memory(server, blocks=6) as node:
        get = server.get

        def late(requested: Sequence[tuple[str, int]]) -> list[bytes]:
            if node.memory.known:
                trio.from_thread.run_sync(node.put, chain(3, "b"))
            return get(requested)

        monkeypatch.setattr(server, "get", late)
        await node.backing.fetch(chain(3))
        assert (node.has(chain(3)), node.has(chain(3, "b"))) == (0, 3)
        await node.saved()


@pytest.mark.trio
async def test_two_may_look_for_the_same_at_once(server: DictServer) -> None:
    async with backed_memory(server) as node:
        node.put(chain(4))
        await node.saved()
    async with backed_memory(server) as node:
        async with trio.open_nursery() as nursery:
            for count in (4, 2, 4):
                nursery.start_soon(node.backing.fetch, chain(count))
        assert node.has(chain(4)) == 4
        assert node.memory.used == 8


@pytest.mark.parametrize(
    "lie",
    [
        lambda value: value[:-1],
        lambda value: value + b"x",
        lambda value: value[:-1] + bytes([value[-1] ^ 1]),
        lambda value: b"\0" + value[1:],
        lambda value: b"x",
    ],
)
@pytest.mark.trio
async def test_what_was_not_put_there_is_a_miss(lie: Callable[[bytes], bytes], server: DictServer) -> None:
    async with backed_memory(server) as node:
        node.put(chain(4))
        await node.saved()
    third = sorted(server.values)[2]
    server.values[third] = lie(server.values[third])
    async with backed_memory(server) as node:
        await node.backing.fetch(chain(4))
        assert node.has(chain(4)) == 2
        assert node.backing.counts["bad"] == 1
        node.put(chain(4))  # as it is computed
        await node.saved()
    async with backed_memory(server) as node:
        await node.backing.fetch(chain(4))
        assert node.has(chain(4)) == 4


@pytest.mark.trio
async def test_swapped_values_are_bad(server: DictServer) -> None:
    async with backed_memory(server) as node:
        node.put(chain(2))
        await node.saved()
    first, second = sorted(server.values)
    server.values = {first: server.values[second], second: server.values[first]}
    async with backed_memory(server) as node:
        await node.backing.fetch(chain(2))
        assert node.has(chain(2)) == 0


@pytest.mark.trio
async def test_a_server_that_is_gone_is_done_without_until_it_is_back(
    server: DictServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with backed_memory(server) as node:
        server.ails = ServerError("it is gone")
        await until(lambda: not node.backing.up)
        node.put(chain(2))
        await node.saved()
        asked = server.asked
        await node.backing.fetch(chain(4, "b"))
        assert server.asked == asked, "nobody waits for a server that is known to be gone"
        assert (node.backing.counts["dropped"], server.puts) == (2, 0)
        server.ails = None
        await until(lambda: node.backing.up)
        node.put(chain(2))
        await node.saved()
        assert len(server.values) == 2
    messages = [record.getMessage() for record in caplog.records]
    assert len([line for line in messages if "it is gone; requests continue without it" in line]) == 1
    assert len([line for line in messages if "answers again" in line]) == 1


@pytest.mark.trio
async def test_a_look_finds_out_that_it_is_gone(server: DictServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_backing, "WATCHED_S", 1000)
    async with backed_memory(server) as node:
        await trio.sleep(0.05)
        server.ails = ServerError("it is gone")
        await node.backing.fetch(chain(2))
        assert not node.backing.up
        node.put(chain(1))
        await node.saved()
        assert node.backing.counts["dropped"] == 1


@pytest.mark.trio
async def test_a_slow_server_is_not_waited_for(server: DictServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_backing, "LOOKED_S", 0.02)
    async with backed_memory(server) as node:
        server.answers.clear()
        with trio.fail_after(10):
            for _ in range(store_backing.READERS + 2):  # more than there are threads
                await node.backing.fetch(chain(2))
        assert node.backing.counts["late"] == store_backing.READERS + 2
        server.answers.set()


@pytest.mark.trio
async def test_a_full_server_is_logged_once_and_asked_again_later(
    server: DictServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with backed_memory(server) as node:
        for attempt in (1, 2):
            server.ails = RefusedError("it is full")
            for name in "abc":
                node.put(chain(1, f"{name}{attempt}"))
                await node.saved()
            assert node.backing.counts["refused"] == 3 * attempt
            assert node.backing.up
            assert len([record for record in caplog.records if "it is full" in record.getMessage()]) == attempt
            server.ails = None
            await trio.sleep(0.02)
            node.put(chain(1, f"a{attempt}"))
            await node.saved()
            assert len(server.values) == attempt


@pytest.mark.trio
async def test_nothing_is_sent_for_a_while_to_one_that_is_full(
    server: DictServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_backing, "WATCHED_S", 1000)
    async with backed_memory(server) as node:
        server.ails = RefusedError("it is full")
        for name in "abc":
            node.put(chain(1, name))
            await node.saved()
        assert (node.backing.counts["refused"], server.puts) == (3, 1)


@pytest.mark.trio
async def test_what_it_has_forgotten_is_written_again(server: DictServer) -> None:
    async with backed_memory(server) as node:
        node.put(chain(2))
        await node.saved()
        server.values.clear()
        server.runs += 1
        looks = server.looks
        await until(lambda: server.looks > looks + 2)
        node.put(chain(2))
        await node.saved()
        assert len(server.values) == 2


@pytest.mark.trio
async def test_what_would_soon_be_too_old_is_written_again(server: DictServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async with backed_memory(server) as node:
        for shift_s, puts in ((0, 1), (RENEW_S - 50, 1), (RENEW_S, 2)):
            now = store_backing.now_ns() + int(shift_s * 1e9)
            with monkeypatch.context() as patch:
                patch.setattr(store_backing, "now_ns", lambda at=now: at)
                node.put(chain(1))
                await node.saved()
            assert server.puts == puts


@pytest.mark.trio
async def test_what_cannot_wait_is_dropped(server: DictServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_backing, "MOST_WAITING", 2)
    async with backed_memory(server) as node:
        node.put(chain(5))
        assert node.backing.counts["dropped"] == 3
        for _ in range(2):
            await node.saved()
            node.put(chain(5))
        await node.saved()
        assert len(server.values) == 5


@pytest.mark.trio
async def test_what_is_evicted_before_it_is_written_is_dropped(server: DictServer) -> None:
    async with backed_memory(server, blocks=4) as node:
        node.put(chain(2))
        node.put(chain(2, "b"))
        await node.saved()
        assert node.backing.counts["saved"] == 2
        assert node.backing.counts["dropped"] == 2
    async with backed_memory(server) as node:
        await node.backing.fetch(chain(2, "b"))
        assert node.has(chain(2, "b")) == 2


@pytest.mark.trio
async def test_what_is_noted_of_what_was_written_stays_small(
    server: DictServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_backing, "MOST_WAITING", 4)
    async with backed_memory(server, blocks=4) as node:
        for number in range(50):
            node.put(chain(1, f"{number}."))
            await node.saved()
        assert node.backing.counts["saved"] == 50
        assert len(node.backing._saved) <= 2 * (2 + 4) + 1
