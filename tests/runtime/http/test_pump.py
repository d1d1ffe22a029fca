"""A pump gives each socket's bytes to whoever takes them, until told to stop, and a fault is its own flow's."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from pdflow_runtime.http import pump
from pdflow_runtime.http.pump import carry
from pdflow_runtime.process.processes import leaves


@pytest.fixture(params=["trio's epoll", "a task"], autouse=True)
def waits_for(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How the pump learns that trio has something to do."""
    if request.param == "a task":
        monkeypatch.setattr(pump, "_internals_of_trio", lambda: (None, lambda: math.inf))


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
        async with trio.open_nursery() as nursery:
            nursery.start_soon(carry, here, take)
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
        async with trio.open_nursery() as nursery:
            for index, (_, here) in enumerate(pairs):
                nursery.start_soon(carry, here, partial(take_indexed, index))
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
        async with trio.open_nursery() as nursery:
            nursery.start_soon(carry, end, take)
            there.send(b"x")
            with pytest.raises(ValueError, match="mine"):
                await carry(here, fail)
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
        with trio.move_on_after(0):
            await carry(here, take)
        there.send(b"x")
        await wait_all_tasks_blocked()
        assert not taken
        await carry(here, take)
    assert taken == [b"x"]


@pytest.mark.trio
async def test_the_internals_of_this_trio_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    epoll, next_deadline = pump._internals_of_trio()
    assert epoll is not None
    with trio.fail_after(100):
        assert next_deadline() == trio.current_effective_deadline()


@pytest.mark.trio
async def test_deadlines_threads_and_other_sockets_are_served_while_a_flow_is_open() -> None:
    taken: list[bytes] = []

    def take(data: bytes) -> bool:
        taken.append(data)
        return bool(data)

    with pair() as (there, here), pair() as (other, end), trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(carry, here, take)
            for number in range(3):
                # What trio then waits for is far away: it must not wait for that without the flow.
                await trio.sleep(0.01)
                there.send(b"%d" % number)
                while len(taken) <= number:
                    await trio.sleep(0.01)
                assert await trio.to_thread.run_sync(int, 7) == 7
                nursery.start_soon(trio.to_thread.run_sync, other.send, b"x")
                await trio.lowlevel.wait_readable(end)
                assert end.recv(1) == b"x"
                await wait_all_tasks_blocked(0.01)
            there.close()
    assert b"".join(taken) == b"012"


@pytest.mark.trio
async def test_a_flow_moves_while_trio_waits_for_a_deadline_that_is_far_away() -> None:
    arrived = trio.Event()

    def take(data: bytes) -> bool:
        return data != b"last"

    def send(there: socket.socket) -> None:
        for data in (b"first", b"last"):
            time.sleep(0.05)
            there.send(data)

    async def until_last(here: socket.socket) -> None:
        await carry(here, take)
        arrived.set()

    with pair() as (there, here):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(until_last, here)
            await trio.sleep(0.01)
            sender = threading.Thread(target=send, args=(there,))
            sender.start()
            with trio.fail_after(60):
                await arrived.wait()
            sender.join()


@pytest.mark.trio
async def test_a_flow_may_cancel_its_own_task_and_end_another_and_the_others_go_on() -> None:
    """As when a client is found gone in the middle of a stream."""
    taken: list[bytes] = []
    own, other = trio.CancelScope(), trio.CancelScope()

    def lose(data: bytes) -> bool:
        own.cancel()
        other.cancel()
        return False

    def take(data: bytes) -> bool:
        taken.append(data)
        return bool(data)

    async def within(scope: trio.CancelScope, sock: socket.socket, each: Callable[[bytes], bool]) -> None:
        with scope:
            await carry(sock, each)

    with pair() as (lost, mine), pair() as (ended, its), pair() as (going, on), trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(carry, on, take)
            nursery.start_soon(within, own, mine, lose)
            nursery.start_soon(within, other, its, take)
            await wait_all_tasks_blocked()
            ended.send(b"late")
            lost.send(b"x")
            await wait_all_tasks_blocked()
            assert own.cancelled_caught
            taken.clear()
            going.send(b"y")
            await wait_all_tasks_blocked()
            assert taken == [b"y"]
            going.close()


def test_an_error_that_is_no_flows_own_ends_the_run() -> None:
    """trio would only log it, and flows would stand still."""

    def fail(data: bytes) -> bool:
        raise SystemExit(3)

    async def main() -> None:
        with pair() as (there, here):
            there.send(b"x")
            await carry(here, fail)

    with pytest.raises(trio.TrioInternalError) as ended:
        trio.run(main)
    assert isinstance(ended.value.__cause__, BaseExceptionGroup)
    assert [type(leaf) for leaf in leaves(ended.value.__cause__)] == [SystemExit]
