"""The driver: order, deadlines behind everything that came before them, doors, and what follows from an event. On a
clock that the tests move."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from pdflow.protocol.deadlines import Deadlines
from pdflow.protocol.effects import Note, SendLocal
from pdflow.protocol.events import PeerResponded, TimeReached
from pdflow.protocol.timers import Timer, TimerKind
from pdflow.protocol.values import Instant, S, Value
from pdflow.serving.core import Port
from pdflow_runtime.clock import now_ns
from pdflow_runtime.nodes.node import MOST_FRAMES, LiveNode


class Do(Value, frozen=True, gc=False):
    what: str


class Scripted:
    """An endpoint that answers as it is told, and remembers what it was handed, and when."""

    timed = True

    def __init__(self, answers: dict[Any, tuple[Any, ...]]) -> None:
        self.answers = answers
        self.events: list[tuple[Any, Instant]] = []
        self.deadlines = Deadlines()

    def handle(self, event: Any, now: Instant) -> tuple[Any, ...]:
        self.events.append((event, now))
        if type(event) is TimeReached:
            self.deadlines.heap.clear()
        return self.answers.get(event, ())

    def due(self, at: Instant) -> None:
        """With its next event it has this deadline."""
        self.deadlines.push(at, Timer(TimerKind.SYNC, "p"))

    def wake_at(self) -> Instant | None:
        return self.deadlines.wake_at()


class Made(LiveNode):
    def __init__(self) -> None:
        super().__init__("n")
        self.done: list[tuple[str, str]] = []
        self.do[Do] = self.keep

    def keep(self, port: Port, effect: Do) -> None:
        self.done.append((port.address, effect.what))


async def handled(node: LiveNode, *endpoints: Scripted, count: int) -> None:
    """Run it until its endpoints have heard so much."""
    with trio.fail_after(1000):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.run)
            while sum(len(endpoint.events) for endpoint in endpoints) < count:
                await trio.sleep(0.001)
            nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_effects_are_done_in_order_and_before_the_next_event(
    autojump_clock: MockClock,
) -> None:
    node = Made()
    one, two = PeerResponded("one"), PeerResponded("two")
    first = Scripted({one: (Do("a"), SendLocal("second", PeerResponded("told")), Do("b"))})
    second = Scripted({two: (Do("c"),), PeerResponded("told"): (Do("d"),)})
    a, b = node.add("first", first, 1), node.add("second", second, 1)
    node.put(a, one)
    node.put(b, two)
    await handled(node, first, second, count=3)
    assert node.done == [("first", "a"), ("first", "b"), ("second", "d"), ("second", "c")]


@pytest.mark.trio
async def test_a_deadline_is_handled_after_all_earlier_events(autojump_clock: MockClock) -> None:
    """C11: what has arrived by the turn in which a deadline is due counts."""
    node, late = Made(), PeerResponded("late")
    endpoint = Scripted({})
    port = node.add("e", endpoint, 1)
    endpoint.due(now_ns() + S)
    node.feed(port, PeerResponded("early"))
    await trio.sleep(1.5)
    node.put(port, late)
    await handled(node, endpoint, count=3)
    assert [event for event, _ in endpoint.events][1:] == [late, TimeReached()]


@pytest.mark.trio
async def test_deadlines_come_when_they_are_due(autojump_clock: MockClock) -> None:
    node, endpoint = Made(), Scripted({})
    port = node.add("e", endpoint, 1)
    begun = now_ns()
    endpoint.due(begun + 7 * S)
    node.feed(port, PeerResponded("something"))
    await handled(node, endpoint, count=2)
    _, (event, when) = endpoint.events
    assert event == TimeReached()
    assert 7 * S <= when - begun < 7.1 * S


@pytest.mark.trio
async def test_a_deadline_that_comes_of_what_the_engine_did_is_not_slept_through(autojump_clock: MockClock) -> None:
    """A prompt is computed, and nobody ever asks for it: its lease ends all the same."""

    class Leasing(Scripted):
        def handle(self, event: Any, now: Instant) -> tuple[Any, ...]:
            answer = super().handle(event, now)
            if event == PeerResponded("computed"):
                self.due(now + 7 * S)
            return answer

    node, endpoint = Made(), Leasing({})
    port = node.add("e", endpoint, 1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.run)
        await trio.testing.wait_all_tasks_blocked()
        node.feed(port, PeerResponded("computed"))
        await trio.sleep(8)
        nursery.cancel_scope.cancel()
    assert [event for event, _ in endpoint.events] == [PeerResponded("computed"), TimeReached()]


@pytest.mark.trio
async def test_a_peer_that_sends_many_frames_waits_and_no_other_does(autojump_clock: MockClock) -> None:
    node, endpoint = Made(), Scripted({})
    port = node.add("e", endpoint, 1)
    offered = 0

    async def talk() -> None:
        nonlocal offered
        for _ in range(3 * MOST_FRAMES):
            await node.offer(port, PeerResponded("much"))
            offered += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(talk)
        await trio.testing.wait_all_tasks_blocked()
        assert offered == MOST_FRAMES
        node.put(port, PeerResponded("our own"))
        nursery.start_soon(node.run)
        with trio.fail_after(10):
            while offered < 3 * MOST_FRAMES:
                await trio.sleep(0.001)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert len(endpoint.events) == 3 * MOST_FRAMES + 1


@pytest.mark.trio
async def test_notes_are_counted(autojump_clock: MockClock) -> None:
    node, odd = Made(), PeerResponded("odd")
    endpoint = Scripted({odd: (Note("that was odd"),)})
    port = node.add("e", endpoint, 1)
    for _ in range(3):
        node.put(port, odd)
    await handled(node, endpoint, count=3)
    assert node.notes == {"that was odd": 3}
