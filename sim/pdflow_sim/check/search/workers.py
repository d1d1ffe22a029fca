"""Search of several scopes, one after the other or in processes, within a budget of time and memory."""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from queue import Empty
from typing import Any

import attrs

from pdflow_sim.check.counterexamples.counterexample import CounterexampleFile, Information
from pdflow_sim.check.counterexamples.replay import named, record
from pdflow_sim.check.moves.compose import relation
from pdflow_sim.check.moves.relation import Transitions
from pdflow_sim.check.scopes.named import Named
from pdflow_sim.check.scopes.scope import Scope
from pdflow_sim.check.search.fairness import Fairness, Repeats, supports
from pdflow_sim.check.search.host_resources import peak_bytes, used_bytes
from pdflow_sim.check.search.needless import NeedlessFailures, judged_in
from pdflow_sim.check.search.search import Counterexample, Coverage, Search
from pdflow_sim.check.state.shadow_state import Broken
from pdflow_sim.check.state.symmetry import Symmetry

MEMORY_BYTES = 6_000_000_000
"""Memory budget of all processes together."""
PROGRESS_S = 0.25
FAIR_STATES = 26_200
"""The largest scopes whose fair runs are checked with timers that repeat at rest, which takes about as long as their
search."""
NIGHTLY_FAIR_STATES = 200_000
FAIR_BUSY_STATES = 3_600
"""The largest scopes whose fair runs are checked with timers that repeat while work is under way, too. Where an
engine may restart, numbers of SYNCs drift apart without end."""
FAIR_GROWTH = 3
"""Fair runs that lead to this many times the states of their scope are given up. Of those that end, only a small one
leads to more."""
CAN_SETTLE = "can settle"


@attrs.frozen
class SearchLimits:
    """The limits of time and memory of a search. `until_s` is on the clock of time.monotonic."""

    until_s: float = float("inf")
    memory_bytes: int = MEMORY_BYTES
    """Memory limit of one process."""
    fair_states: int = FAIR_STATES
    """The largest scopes whose fair runs are checked, and the most states in which L9 is judged."""


@attrs.frozen(kw_only=True)
class Searched:
    """The result of the search of one scope."""

    name: str
    scope: Scope
    states: int = 0
    transitions: int = 0
    depth: int = 0
    reductions: tuple[str, ...] = ()
    """The reductions by which not every state was visited; empty where each was."""
    odds: float = 0.0
    """Upper bound of the probability that any two of these states were taken for one."""
    seconds: float = 0.0
    peak_bytes: int = 0
    stopped_by: str = ""
    """"time" or "memory"; empty for a search that saw everything, found something, or was truncated."""
    truncated: bool = False
    """Whether the search stopped at the scope's own limit of states."""
    liveness: str = CAN_SETTLE
    """What was shown of runs without further faults: the value of a `Repeats` (every fair run resolves), or only that
    one schedule settles from every state."""
    needless_states: int | None = None
    """Number of states in which L9 was judged; None: in none."""
    needless_in: str | None = None
    """Name of the scope whose judgement of L9 counts for this one; None: L9 is not judged in it."""
    goals: tuple[str, ...] = ()
    missed: tuple[str, ...] = ()
    """Goals that a complete search, or one that was truncated, never reached."""
    counterexample: CounterexampleFile | None = None
    """The shortest way to a violated invariant; None if there is none."""

    @property
    def holds(self) -> bool:
        return not (self.stopped_by or self.truncated or self.missed or self.counterexample)


Progress = Callable[[str, Coverage, int], None]
"""Called with a scope's name, the coverage of its search, and its process's memory in bytes."""


def search(what: Named, limits: SearchLimits, progress: Progress, needless_in: str | None = None) -> Searched:
    """Search one scope until every state was seen, a limit is reached or an invariant breaks. In nightly scopes, of the
    states that differ by a renaming only, one is visited.

    Args:
        needless_in: name of the scope whose judgement of L9 counts for this one; its own name: judge it here.
    """
    world = relation(what.scope)
    symmetry = Symmetry(world.space) if what.nightly else None
    began = time.process_time()
    stopped_by = ""
    shown_at = 0.0

    def tick(coverage: Coverage) -> bool:
        nonlocal stopped_by, shown_at
        now = time.monotonic()
        if now > limits.until_s:
            stopped_by = "time"
        elif used_bytes() + coverage.growth_bytes > limits.memory_bytes:
            stopped_by = "memory"
        if now > shown_at + PROGRESS_S:
            shown_at = now
            progress(what.name, coverage, used_bytes())
        return bool(stopped_by)

    found: Counterexample | None = None
    fairness = fairness_of(what, world, limits.fair_states)
    look = Search(world, symmetry, fairness)
    try:
        look.run(what.max_states or 1 << 62, tick, lively=True)
    except Broken as broken:
        found = look.counterexample(broken)
    coverage, reached = look.found, tuple(world.space.checker.seen)
    truncated = not (coverage.complete or stopped_by or found)
    needless = NeedlessFailures(world, limits.fair_states)
    if needless_in == what.name and found is None and not stopped_by:
        found = needless.search()
    return Searched(
        name=what.name,
        scope=what.scope,
        states=coverage.states,
        transitions=coverage.transitions,
        depth=coverage.depth,
        reductions=look.reductions,
        odds=coverage.odds,
        seconds=time.process_time() - began,
        peak_bytes=peak_bytes(),
        stopped_by=stopped_by,
        truncated=truncated,
        liveness=next((c.repeats.value for c in fairness if coverage.complete and not c.given_up), CAN_SETTLE),
        needless_states=needless.states or None,
        needless_in=needless_in,
        goals=tuple(sorted(reached)),
        missed=tuple(sorted(what.goals.difference(reached))) if coverage.complete or truncated else (),
        counterexample=None if found is None else _recorded(world, found),
    )


def _recorded(world: Transitions, found: Counterexample) -> CounterexampleFile:
    information = Information(scheduler="breadth first")
    return record(world, named(world, found.moves), repeats=found.broken.repeats, information=information)


def fairness_of(what: Named, world: Transitions, largest: int) -> tuple[Fairness, ...]:
    """Return the checks of the fair runs of a scope, the one that shows most first; none where they are too many."""
    found: list[Repeats] = []
    if what.states and supports(what.scope) and not what.endless:
        restarts = what.scope.p_restart or what.scope.d_restart
        small = what.states <= min(FAIR_BUSY_STATES, largest) and (
            not restarts or not what.scope.dialect.control_frames
        )
        found += [Repeats.LINKS_QUIET] * small
        found += [Repeats.AT_REST] * (what.states <= largest)
    return tuple(Fairness(world, repeats, FAIR_GROWTH * what.states + 1000) for repeats in found)


def search_all(
    scopes: Sequence[Named],
    jobs: int,
    until_s: float,
    progress: Progress,
    waiting: Callable[[], None],
    fair_states: int = FAIR_STATES,
) -> Iterator[Searched]:
    """Yield the result of each scope as its search ends; scopes not begun when the time ran out are stopped by "time".

    Args:
        waiting: called again and again until all searches have ended.
    """
    limits = SearchLimits(until_s, MEMORY_BYTES // max(1, jobs), fair_states)
    needless_in = judged_in(scopes)
    if jobs == 1:
        for what in scopes:
            yield search(what, limits, progress, needless_in.get(what.name))
            gc.collect()
        return
    # The larger ones first: the last to end is then one of the small.
    order = sorted(scopes, key=lambda what: -(what.states or what.max_states or 1 << 30))
    methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    with context.Manager() as manager:
        news = manager.Queue()
        with ProcessPoolExecutor(jobs, mp_context=context, initializer=_hired, initargs=(news,)) as pool:
            pending: set[Future[Searched]] = {
                pool.submit(_search, what, limits, needless_in.get(what.name)) for what in order
            }
            try:
                while pending:
                    done, pending = wait(pending, timeout=PROGRESS_S, return_when=FIRST_COMPLETED)
                    for title, coverage, memory in _drained(news):
                        progress(title, coverage, memory)
                    waiting()
                    for future in done:
                        yield future.result()
            except BaseException:
                for future in pending:
                    future.cancel()
                for process in multiprocessing.active_children():
                    process.terminate()
                raise


_news: Any = None


def _hired(news: Any) -> None:
    global _news
    _news = news


def _search(what: Named, limits: SearchLimits, needless_in: str | None) -> Searched:
    gc.collect()  # A world refers to itself, and the last one may have been large.
    return search(what, limits, lambda *seen: _news.put(seen), needless_in)


def _drained(news: Any) -> Iterator[tuple[str, Coverage, int]]:
    while True:
        try:
            yield news.get_nowait()
        except Empty:
            return
