"""A pump gives each socket's bytes to whoever takes them, until told to stop, and a fault is its own flow's."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import partial

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from pdflow_runtime.http.pump import Pump


@asynccontextmanager
async def pumping() -> AsyncIterator[Pump]:
    pump, scope = Pump(), trio.CancelScope()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pump.run, scope)
        yield pump
        scope.cancel()


@contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    there, here = socket.socketpair()
    with there, here:
        here.setblocking(False)
        yield there, here


@pytest.mark.trio
async def test_bytes_are_taken_until_enough_and_the_rest_stays() -> None:
    taken: list[bytes] = []

    def take(data: bytes) -> bool:
        taken.append(data)
        return len(taken) < 2

    with pair() as (there, here):
        async with pumping() as pump, trio.open_nursery() as nursery:
            nursery.start_soon(pump.carry, here, take)
            for text in (b"1", b"2", b"3"):
                await wait_all_tasks_blocked()
                there.send(text)
            await wait_all_tasks_blocked()
        assert taken == [b"1", b"2"]
        assert here.recv(10) == b"3"


@pytest.mark.trio
async def test_more_flows_than_a_turn_has_all_move() -> None:
    count = 100
    taken: dict[int, bytes] = {}

    def take_indexed(index: int, data: bytes) -> bool:
        taken[index] = data
        return False

    with ExitStack() as stack:
        pairs = [stack.enter_context(pair()) for _ in range(count)]
        async with pumping() as pump, trio.open_nursery() as nursery:
            for index, (_, here) in enumerate(pairs):
                nursery.start_soon(pump.carry, here, partial(take_indexed, index))
            await wait_all_tasks_blocked()
            for index, (there, _) in enumerate(pairs):
                there.send(b"%d" % index)
    assert taken == {index: b"%d" % index for index in range(count)}


@pytest.mark.trio
async def test_a_fault_is_raised_where_the_flow_is_awaited_and_nowhere_else() -> None:
    taken: list[bytes] = []

    def fail(data: bytes) -> bool:
        raise ValueError("mine")

    def take(data: bytes) -> bool:
        taken.append(data)
        return bool(data)

    with pair() as (there, here), pair() as (other, end):
        async with pumping() as pump, trio.open_nursery() as nursery:
            nursery.start_soon(pump.carry, end, take)
            there.send(b"x")
            with pytest.raises(ValueError, match="mine"):
                await pump.carry(here, fail)
            other.send(b"y")
            await wait_all_tasks_blocked()
            other.close()
    assert taken == [b"y", b""]


@pytest.mark.trio
async def test_a_cancelled_flow_takes_nothing_more_and_its_socket_can_flow_again() -> None:
    taken: list[bytes] = []

    def take(data: bytes) -> bool:
        taken.append(data)
        return False

    with pair() as (there, here):
        async with pumping() as pump:
            with trio.move_on_after(0):
                await pump.carry(here, take)
            there.send(b"x")
            await wait_all_tasks_blocked()
            assert not taken
            await pump.carry(here, take)
    assert taken == [b"x"]
