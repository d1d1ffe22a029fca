"""simpy's processes on the simulation's queue: random programs run as in a plain simpy environment, step for step."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import attrs
import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st
from simpy.events import Event, Process

from pdflow_sim.clock import AFTER_ENGINES, DEADLINE, INPUT, POLL, Clock
from pdflow_sim.environment import ClockEnvironment

EVENTS = 3
"""Events that programs share."""

DELAYS = st.integers(0, 3)
STEPS = st.one_of(
    st.tuples(st.just("timeout"), DELAYS),
    st.tuples(st.just("callback"), DELAYS, st.sampled_from([INPUT, POLL, DEADLINE, AFTER_ENGINES])),
    st.tuples(st.just("wait"), st.integers(0, EVENTS - 1)),
    st.tuples(st.just("succeed"), st.integers(0, EVENTS - 1)),
    st.tuples(st.just("wait or timeout"), st.integers(0, EVENTS - 1), DELAYS),
    st.tuples(st.just("start"), st.integers(0, 3)),
    st.tuples(st.just("interrupt"), st.integers(0, 3)),
)
PROGRAMS = st.lists(st.lists(STEPS, max_size=6), min_size=4, max_size=4)


@attrs.define
class Run:
    """One run of programs. `call(delay, callback, arg, priority)` schedules a plain callback."""

    env: simpy.Environment
    call: Callable[[int, Callable[[Any], None], Any, int], None]
    programs: list[list[Any]]
    events: list[Event] = attrs.field(factory=list)
    processes: list[Process] = attrs.field(factory=list)
    trace: list[tuple[float, int, Any]] = attrs.field(factory=list)
    """(time, process or -1 for a callback, what it has done)."""

    def start(self, program: int) -> None:
        if len(self.processes) < 12:
            self.processes.append(self.env.process(self.steps(len(self.processes), program)))

    def steps(self, process: int, program: int) -> Generator[Event, Any, None]:
        for step in self.programs[program]:
            self.trace.append((self.env.now, process, step))
            try:
                yield from self.step(process, *step)
            except simpy.Interrupt as interrupt:
                self.trace.append((self.env.now, process, interrupt.cause))
        self.trace.append((self.env.now, process, "end"))

    def step(self, process: int, kind: str, *args: int) -> Generator[Event, Any, None]:
        if kind == "timeout":
            yield self.env.timeout(args[0])
        elif kind == "callback":
            self.call(args[0], self.called, (process, args), args[1])
        elif kind == "wait":
            yield self.events[args[0]]
        elif kind == "wait or timeout":
            yield self.events[args[0]] | self.env.timeout(args[1])
        elif kind == "succeed":
            if not self.events[args[0]].triggered:
                self.events[args[0]].succeed()
        elif kind == "start":
            self.start(args[0])
        else:
            other = self.processes[args[0] % len(self.processes)]
            if other.is_alive and other is not self.env.active_process:
                other.interrupt(process)

    def called(self, arg: Any) -> None:
        self.trace.append((self.env.now, -1, arg))

    def begin(self) -> None:
        self.events = [self.env.event() for _ in range(EVENTS)]
        for program in range(len(self.programs)):
            self.start(program)


def plain(programs: list[list[Any]]) -> Run:
    """By simpy alone: a callback is one of a triggered event."""
    env = simpy.Environment()

    def call(delay: int, callback: Callable[[Any], None], arg: Any, priority: int) -> None:
        event: Any = env.event()
        event._ok, event._value = True, None
        event.callbacks.append(lambda _: callback(arg))
        env.schedule(event, priority, delay)

    return Run(env, call, programs)


def ours(programs: list[list[Any]]) -> Run:
    clock = Clock()
    return Run(ClockEnvironment(clock), clock.call, programs)


@given(PROGRAMS)
def test_processes_and_callbacks_run_in_simpys_order(programs: list[list[Any]]) -> None:
    expected, run = plain(programs), ours(programs)
    expected.begin()
    run.begin()
    expected.env.run()
    assert isinstance(run.env, ClockEnvironment)
    run.env.clock.run()
    assert run.trace == expected.trace
    assert run.env.now == expected.env.now
    assert run.env.clock.pending == 0


@given(PROGRAMS, st.lists(st.integers(1, 3), max_size=4), st.integers(0, EVENTS - 1))
def test_runs_until_a_time_or_an_event_as_simpy_does(programs: list[list[Any]], times: list[int], event: int) -> None:
    expected, run = plain(programs), ours(programs)
    for each in (expected, run):
        each.begin()
    for step in times:
        for each in (expected, run):
            each.env.run(until=each.env.now + step)
        assert (run.trace, run.env.now, run.env.peek()) == (expected.trace, expected.env.now, expected.env.peek())
    ends = []
    for each in (expected, run):
        try:
            each.env.run(until=each.events[event])
            ends.append("reached")
        except RuntimeError:
            ends.append("never triggered")
        each.env.run()
    assert ends[0] == ends[1]
    assert run.trace == expected.trace


def test_a_process_that_fails_ends_the_run() -> None:
    clock = Clock()
    env = ClockEnvironment(clock)

    def fails() -> Generator[Event, Any, None]:
        yield env.timeout(5)
        raise ValueError("a bug in a process")

    env.process(fails())
    with pytest.raises(ValueError, match="a bug in a process"):
        clock.run()
    assert clock.now == 5


def test_a_failure_that_a_process_handles_does_not_end_the_run() -> None:
    clock = Clock()
    env = ClockEnvironment(clock)
    handled = []

    def waits(event: Event) -> Generator[Event, Any, None]:
        try:
            yield event
        except ValueError as error:
            handled.append(str(error))

    event = env.event()
    env.process(waits(event))
    event.fail(ValueError("refused"))
    clock.run()
    assert handled == ["refused"]


def test_background_timeouts_are_no_work_to_come() -> None:
    clock = Clock()
    env = ClockEnvironment(clock)
    seen = []

    def observes() -> Generator[Event, Any, None]:
        while True:
            yield env.background_timeout(10)
            seen.append(env.now)
            if not clock.has_work:
                return

    env.process(observes())
    clock.call(25, lambda _: None, None)
    clock.run()
    assert seen == [10, 20, 30]
    assert (clock.pending, clock.background) == (0, 0)


def test_a_timeout_at_a_priority_comes_after_what_is_before_it_at_that_instant() -> None:
    clock = Clock()
    env = ClockEnvironment(clock)
    seen = []

    def waits() -> Generator[Event, Any, None]:
        yield env.timeout_at_priority(10, AFTER_ENGINES)
        seen.append("process")

    env.process(waits())
    clock.call(10, seen.append, "deadline", DEADLINE)
    clock.call(10, seen.append, "input", INPUT)
    clock.run()
    assert seen == ["input", "deadline", "process"]


def test_an_empty_schedule_is_simpys() -> None:
    env = ClockEnvironment(Clock())
    assert env.peek() == float("inf")
    with pytest.raises(simpy.core.EmptySchedule):
        env.step()
