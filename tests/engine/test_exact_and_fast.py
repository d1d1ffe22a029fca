"""Planning many steps at once changes nothing: random scenarios, run in both ways, agree to the nanosecond.

A small driver stands in for the simulated world: messages before engine wake-ups at one instant, polls after both.
Times are drawn from a grid on which steps, delays and arrivals coincide, zero included, or from odd numbers.
"""

from __future__ import annotations

import os
from heapq import heappop, heappush
from typing import Any

import attrs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdflow.cost import ExtraBlocks, LinearTable, LinearTime, StepCost, constant
from pdflow.engine import Admitted, Dropped, Engine, Finished, Limits, NeverFitsError, Prefilled, Sequence
from pdflow.engine.hosted import HostedEngine
from pdflow.engine.layered import LayeredLoad
from pdflow.engine.noise import StepNoise
from pdflow.memory.caching import CachingPool
from pdflow.memory.paged import PagedPool

MESSAGE, WAKE, POLL = 0, 1, 2


class Log:
    """Rows of the step log, expanded to single steps: (start, time, weight)."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int, int]] = []

    def add(self, start: int, first: int, delta: int, steps: int, weight: int) -> None:
        for step in range(steps):
            self.steps.append((start, first + step * delta, weight))
            start += first + step * delta


@attrs.frozen
class Job:
    at: int
    prompt: int
    output: int
    kind: str
    remote_tokens: int
    prefix: tuple[int, ...]
    delay: int
    drop_at: int | None


@attrs.frozen
class World:
    jobs: tuple[Job, ...]
    limits: Limits
    cost: StepCost
    blocks: int
    span: int
    probes: tuple[int, ...]
    noise_ppm: tuple[int, ...]
    layers: int
    """Of sequences that load in their first step."""


class Driver:
    def __init__(self, world: World, exact: bool) -> None:
        self.pool = CachingPool(world.blocks, world.span) if world.span else PagedPool(world.blocks)
        self.log = Log()
        self.stalls = Log()
        self.busy: list[int] = []
        self.boundaries: list[tuple[int, int | None]] = []
        in_steps = any(job.kind == "in-step" for job in world.jobs)
        engine_class = HostedEngine if in_steps else Engine
        noise = StepNoise(world.noise_ppm, 1, world.cost, run=4) if world.noise_ppm else None
        self.engine = engine_class(
            world.limits, world.cost, self.pool, exact=exact, log=self.log, stalls=self.stalls, noise=noise
        )
        self.layers = world.layers
        self.layered: LayeredLoad | None = None
        self.heap: list[tuple[int, int, int, str, Any]] = []
        self.count = 0
        self.trace: list[tuple[Any, ...]] = []
        self.seqs: list[Sequence] = []
        self.wakes = 0
        self.done: dict[int, str] = {}
        self.jobs = world.jobs
        for index, job in enumerate(world.jobs):
            seq = Sequence(
                index,
                job.prompt,
                job.output,
                remote_kv=job.kind in ("remote", "in-step"),
                loads_in_step=job.kind == "in-step",
                prefill_only=job.kind == "prefill",
                remote_tokens=job.remote_tokens,
                prefix=job.prefix,
            )
            self.seqs.append(seq)
            self.at(job.at, MESSAGE, "submit", seq)
            if job.drop_at is not None:
                self.at(job.drop_at, MESSAGE, "drop", seq)
        for at in world.probes:
            self.at(at, MESSAGE, "probe", None)

    def at(self, time: int, priority: int, what: str, arg: Any) -> None:
        self.count += 1
        heappush(self.heap, (time, priority, self.count, what, arg))

    def run(self) -> Driver:
        armed = None
        while self.heap:
            now, _, _, what, arg = heappop(self.heap)
            getattr(self, what)(now, arg)
            wake = self.engine.wake_at()
            if wake is not None and wake != armed:
                assert wake >= now
                self.at(wake, WAKE, "wake", None)
            armed = wake
        return self

    def wake(self, now: int, _: None) -> None:
        if self.engine.wake_at() != now:
            return
        self.wakes += 1
        for outcome in self.engine.advance(now):
            seq = outcome.seq
            assert outcome.at_ns == now
            assert seq.index not in self.done
            self.trace.append((type(outcome).__name__, seq.index, now))
            delay = self.jobs[seq.index].delay
            match outcome:
                case Admitted() if seq.loads_in_step:
                    if self.layered is None:
                        self.layered = LayeredLoad(self.layers)
                    self.layered.begin(1)
                    self.at(now + delay, MESSAGE, "layer_landed", (seq, 0))
                case Admitted():
                    assert seq.allocation is not None
                    self.at(now + delay, MESSAGE, "transferred", seq)
                case Prefilled():
                    self.done[seq.index] = "prefilled"
                    self.at(now + delay, MESSAGE, "released", seq.allocation)
                case Finished():
                    self.done[seq.index] = "finished"

    def submit(self, now: int, seq: Sequence) -> None:
        try:
            self.engine.submit(seq, now)
        except NeverFitsError:
            self.done[seq.index] = "refused"

    def transferred(self, now: int, seq: Sequence) -> None:
        if self.done.get(seq.index) == "dropped":
            return
        self.engine.loaded(seq, now)

    def layer_landed(self, now: int, arg: tuple[Sequence, int]) -> None:
        seq, layer = arg
        engine, layered = self.engine, self.layered
        assert isinstance(engine, HostedEngine)
        assert layered is not None
        assert engine.awaits(seq)
        layered.copied(layer, now)
        if layer + 1 < self.layers:
            self.at(now + self.jobs[seq.index].delay, MESSAGE, "layer_landed", (seq, layer + 1))
            return
        engine.wait_no_more(seq, now, layered)
        if not engine.awaits_layers:
            self.layered = None

    def released(self, now: int, allocation: Any) -> None:
        self.engine.release(allocation, now)

    def drop(self, now: int, seq: Sequence) -> None:
        held = seq.allocation
        answer = self.engine.drop(seq, now)
        self.trace.append(("drop", seq.index, now, answer))
        if answer != Dropped.NOT_HERE:
            self.done[seq.index] = "dropped"
        if answer == Dropped.BLOCKS_ARE_YOURS:
            assert held is not None
            self.pool.quarantine(held)
            self.at(now + self.jobs[seq.index].delay, MESSAGE, "released", held)

    def probe(self, now: int, _: None) -> None:
        engine = self.engine
        figures = (engine.waiting, engine.loading, engine.running, engine.kv_blocks_used(now))
        self.busy.append(engine.busy_ps(now))
        self.trace.append(("probe", now, *figures))
        self.poll(now, now)

    def poll(self, now: int, since: int) -> None:
        boundary = self.engine.next_boundary(now)
        if boundary == now:
            self.at(now, POLL, "poll", since)
        else:
            self.boundaries.append((since, boundary))

    def stamps(self) -> list[tuple[Any, ...]]:
        return [
            (
                s.index, s.admitted_ns, s.start_ns, s.first_token_ns, s.preemptions, s.generated, s.phase,
                tuple(s.token_runs), s.cached_tokens,
            )
            for s in self.seqs
        ]  # fmt: skip


def nanoseconds(grid: int, most: int) -> st.SearchStrategy[int]:
    return st.integers(0, most).map(lambda n: n * grid)


@st.composite
def prefixes(draw: st.DrawFn, blocks: int) -> tuple[int, ...]:
    """Names of prompts that part from the one way or another: a name stands for all before it, too."""
    branch, fork = draw(st.integers(0, 2)), draw(st.integers(0, 3))
    return tuple(at if at < fork else 1000 * branch + 100 * fork + at for at in range(blocks))


def extra_blocks() -> st.SearchStrategy[ExtraBlocks]:
    return st.builds(
        ExtraBlocks, window_blocks=st.integers(1, 4), layers=st.integers(1, 6), block_layers=st.integers(1, 3)
    )


@st.composite
def generated_world(draw: st.DrawFn) -> World:
    on_grid = draw(st.booleans())
    grid = draw(st.sampled_from([1, 10, 1000])) if on_grid else 1
    unit = grid * 1000 if on_grid else 1
    coefficient = st.integers(0, 3).map(lambda n: n * unit) if on_grid else st.integers(0, 9000)
    shape = draw(st.sampled_from(["affine", "decode-only", "constant", "zero"]))
    if shape == "affine":
        cost = StepCost(
            h0=draw(coefficient),
            h1=draw(coefficient),
            a1=draw(coefficient),
            a2=draw(st.sampled_from([0, unit])),
            c0=draw(coefficient),
            c2=draw(st.sampled_from([0, 1, unit])),
            linear=LinearTime(slope_ps=draw(coefficient), floor_ps=draw(coefficient)),
        )
    elif shape == "decode-only":
        cost = StepCost(h0=unit, c2=draw(st.sampled_from([0, unit])))
    elif shape == "constant":
        cost = attrs.evolve(constant(), hp=draw(coefficient), c0=draw(coefficient))
    else:
        cost = attrs.evolve(constant(), hp=draw(coefficient))
    if draw(st.booleans()):
        cost = attrs.evolve(cost, hw=draw(coefficient))
    if draw(st.booleans()):
        window = draw(st.sampled_from([1, 2, 7, 16, 30]))
        cost = attrs.evolve(cost, window=window, aw=draw(st.sampled_from([0, unit])), cw=draw(coefficient))
    replicas = draw(st.sampled_from([1, 1, 2, 3]))
    if draw(st.booleans()):
        cost = attrs.evolve(cost, experts=LinearTable(tokens=(1, 4), ps=(unit, unit + draw(coefficient))))
    kinds = draw(
        st.sampled_from(
            [
                *("remote", "prefill", "local", "remote local", "local prefill", "remote local prefill"),
                *("in-step", "in-step local", "in-step remote local prefill"),
            ]
        )
    ).split()
    span = 60 if on_grid else 60 * draw(st.sampled_from([1, 5, 40]))
    block_size = draw(st.sampled_from([1, 2, 4, 16]))
    blocks = draw(st.sampled_from([3, 6, 10, 20, 50, 1000]))
    span = draw(st.sampled_from([0, 0, 1, 2]))
    jobs = []
    for _ in range(draw(st.integers(1, 12))):
        at = draw(nanoseconds(grid, span))
        prompt = draw(st.integers(1, 20))
        kind = draw(st.sampled_from(kinds))
        jobs.append(
            Job(
                at=at,
                prompt=prompt,
                output=draw(st.integers(1, 24)),
                kind=kind,
                remote_tokens=prompt - 1 if kind == "remote" and draw(st.booleans()) else 0,
                prefix=draw(prefixes(prompt // (span * block_size))) if span else (),
                delay=draw(nanoseconds(grid, 9)),
                drop_at=at + draw(nanoseconds(grid, 2 * span)) if draw(st.booleans()) else None,
            )
        )
    seats = draw(st.sampled_from([1, 2, 4, 16]))
    prompts_first = "in-step" not in kinds and draw(st.booleans())
    replicas = 1 if prompts_first else replicas
    return World(
        jobs=tuple(jobs),
        limits=Limits(
            max_num_seqs=seats,
            max_num_batched_tokens=(seats + draw(st.integers(0, 30))) * replicas,
            block_size=block_size,
            async_scheduling=not prompts_first and draw(st.booleans()),
            prompts_first=prompts_first,
            replicas=replicas,
            extra=draw(st.none() | extra_blocks()),
        ),
        cost=cost,
        blocks=blocks,
        span=span,
        probes=tuple(draw(st.lists(nanoseconds(grid, 3 * span), max_size=6))),
        noise_ppm=draw(st.sampled_from([(), (-500_000, 250_000, 500_000), (-123_457, 0, 300_001, 7)])),
        layers=draw(st.sampled_from([1, 2, 5])),
    )


def token_times(driver: Driver, seq: Sequence) -> list[int]:
    ends = [start + time for start, time, _ in driver.log.steps]
    return [ends[step] for first, last in seq.token_runs for step in range(first, last + 1)]


@settings(
    max_examples=int(os.environ.get("PDFLOW_EXAMPLES", "150")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(generated_world())
def test_exact_and_fast_agree(world: World) -> None:
    fast = Driver(world, exact=False).run()
    exact = Driver(world, exact=True).run()
    assert fast.trace == exact.trace
    assert sorted(fast.boundaries, key=str) == sorted(exact.boundaries, key=str)
    assert fast.stamps() == exact.stamps()
    assert fast.log.steps == exact.log.steps
    assert fast.stalls.steps == exact.stalls.steps
    assert fast.engine.preemptions == exact.engine.preemptions
    assert fast.engine.prefix_cache_hits == exact.engine.prefix_cache_hits
    assert fast.wakes <= exact.wakes
    # A step that ended within the nanosecond of the question: only its own wake-up knows what followed.
    assert all(abs(a - b) < 1000 for a, b in zip(fast.busy, exact.busy, strict=True))
    for driver in (fast, exact):
        check_end(driver)


def check_end(driver: Driver) -> None:
    """Nothing is missing, nothing is leaked, and every token has its time."""
    engine, pool = driver.engine, driver.pool
    assert len(driver.done) == len(driver.seqs)
    assert (engine.waiting, engine.loading, engine.running, engine.seats_taken) == (0, 0, 0, 0)
    assert (pool.free, pool.grown, pool.allocated, pool.quarantined) == (pool.num_blocks, 0, 0, 0)
    assert engine.wake_at() is None
    itl_samples = sum(weight for _, _, weight in driver.log.steps)
    itl_samples += sum(weight for _, _, weight in driver.stalls.steps)
    tokens = gaps = 0
    finished_at = {index: at for kind, index, at, *_ in driver.trace if kind == "Finished"}
    for seq in driver.seqs:
        times = token_times(driver, seq)
        assert times == sorted(times)
        tokens += len(times)
        gaps += max(0, len(times) - 1)
        if driver.done[seq.index] == "finished":
            assert len(times) == seq.generated == seq.output_tokens
            assert -(-times[0] // 1000) == seq.first_token_ns
            assert -(-times[-1] // 1000) == finished_at[seq.index]
    assert gaps == itl_samples
