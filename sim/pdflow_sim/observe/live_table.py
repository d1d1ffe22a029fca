"""A table of a run's last seconds, which is shown while the run goes on and is gone when it ends.

Figures are computed between two turns of the world, when a request has ended, and so seldom that they cost next to
nothing; to compute them leaves the world as it was. They are those of the last ten seconds of simulated time, or of
however much passed since the table was last drawn.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from rich.console import Console, Group, RenderableType
from rich.constrain import Constrain
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pdflow.results import formatting
from pdflow.results.records import Outcome
from pdflow.results.totals import NS_PER_S, PS_PER_NS, share
from pdflow.scenario.schema.scenario import ResolvedScenario
from pdflow_sim.nodes.engine_node import SimEngineNode
from pdflow_sim.world import World

WINDOW_NS: Final = 10 * NS_PER_S
AT_ONCE_S: Final = 0.4
"""The least time between two drawings."""
COST: Final = 100
"""The least time between two drawings, in times as long as drawing takes."""
POOLS_SHOWN: Final = 8
_WIDEST: Final = 80


class Sample(NamedTuple):
    """Counts and times that only grow, at one instant."""

    now: int
    ended: int
    bytes_moved: int
    busy_ps: dict[str, int]
    """The time in steps of each pool's engines."""


class Watcher:
    """Draws the table of a world. `ended` is called as each request ends."""

    def __init__(self, live: Live, scenario: ResolvedScenario, world: World) -> None:
        self.live = live
        self.scenario = scenario
        self.world = world
        self.began = self.due = time.monotonic()
        self.requests: deque[int] = deque()
        """The requests that ended within the window, in that order."""
        self.samples = deque([Sample(0, 0, 0, {})])
        """The first is where the window begins."""

    def ended(self, request: int, _: Outcome) -> None:
        self.requests.append(request)
        if time.monotonic() >= self.due:
            self.draw()

    def draw(self) -> None:
        """Show the table of now."""
        now = time.monotonic()
        self.live.update(Constrain(self.table(now - self.began), _WIDEST), refresh=True)
        drawn = time.monotonic()
        self.due = drawn + max(AT_ONCE_S, COST * (drawn - now))

    def table(self, spent_s: float) -> Group:
        """Return what the terminal shows; `spent_s` of the wall clock have passed."""
        pools = self.pools()
        last = self.sample(pools)
        first = self.samples[0]
        return Group(
            self.progress(spent_s),
            self.last_seconds(first, last),
            self.engines(pools, first, last),
        )

    def pools(self) -> dict[str, list[SimEngineNode]]:
        """Return the nodes of each pool, in the scenario's order, dead ones too."""
        world = self.world
        found: dict[str, list[SimEngineNode]] = {pool.name: [] for pool in self.scenario.pools}
        for node in (*world.prefills, *world.decodes):
            found[world.fabric.paths.pool_of[node.name].name].append(node)
        return found

    def sample(self, pools: dict[str, list[SimEngineNode]]) -> Sample:
        """Take one, and let the window begin as late as it may."""
        world, samples = self.world, self.samples
        now = world.clock.now
        busy_ps = {pool: sum(node.busy_ps(now) for node in nodes) for pool, nodes in pools.items()}
        last = Sample(now, world.ended, world.totals.bytes_moved, busy_ps)
        samples.append(last)
        while len(samples) > 2 and samples[1].now <= now - WINDOW_NS:
            samples.popleft()
        while len(self.requests) > last.ended - samples[0].ended:
            self.requests.popleft()
        return last

    def progress(self, spent_s: float) -> Table:
        world, whole = self.world, self.scenario.workload.requests
        done = formatting.count(world.ended) + ("" if whole is None else f" of {formatting.count(whole)}")
        passed = f"{formatting.duration(world.clock.now)} in {formatting.duration(int(spent_s * NS_PER_S))}"
        line: list[RenderableType] = [Text(f"{done} requests", no_wrap=True), Text(passed, "dim", no_wrap=True)]
        if whole is not None:
            line.insert(0, ProgressBar(total=whole, completed=world.ended, width=20))
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_row(Text(_short(self.scenario.name), "bold", no_wrap=True), *line)
        return grid

    def last_seconds(self, first: Sample, last: Sample) -> Table:
        world, passed_ns = self.world, last.now - first.now
        ttft, tpot = self.latencies_ms()
        moved = (last.bytes_moved - first.bytes_moved) * NS_PER_S // max(passed_ns, 1)
        rate = (last.ended - first.ended) * NS_PER_S / max(passed_ns, 1)
        open_now = formatting.count(len(world.records) - world.ended)
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(style="bold")
        grid.add_row(
            f"last {formatting.duration(passed_ns)}", f"{formatting.number(rate)} requests/s ended, {open_now} open"
        )
        grid.add_row("TTFT", f"p50 {_ms(ttft, 50)}, p99 {_ms(ttft, 99)}")
        grid.add_row("TPOT", f"p50 {_ms(tpot, 50)}")
        if world.decodes:
            grid.add_row(
                "KV moved", f"{formatting.size(moved)}/s, {formatting.count(len(world.fabric.flows))} under way"
            )
        return grid

    def latencies_ms(self) -> tuple[list[float], list[float]]:
        """Return TTFT and TPOT of the window's completed requests, sorted."""
        known = [both for request in self.requests if (both := self.world.records.latencies_ms(request)) is not None]
        return sorted(ttft for ttft, _ in known), sorted(tpot for _, tpot in known if tpot is not None)

    def engines(self, pools: dict[str, list[SimEngineNode]], first: Sample, last: Sample) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
        table.add_column("pool", style="bold", no_wrap=True)
        for name in ("engines", "waiting", "loading", "running", "in steps", "KV used"):
            table.add_column(name, justify="right", no_wrap=True)
        passed_ps = (last.now - first.now) * PS_PER_NS
        for pool, nodes in list(pools.items())[:POOLS_SHOWN]:
            engines = [node.engine for node in nodes if node.alive]
            blocks = sum(engine.pool.num_blocks for engine in engines)
            table.add_row(
                Text(_short(pool)),
                formatting.count(len(engines)),
                formatting.count(sum(engine.waiting for engine in engines)),
                formatting.count(sum(engine.loading for engine in engines)),
                formatting.count(sum(engine.running for engine in engines)),
                formatting.percent(share(last.busy_ps[pool] - first.busy_ps.get(pool, 0), passed_ps * len(nodes))),
                formatting.percent(share(sum(engine.kv_blocks_used(last.now) for engine in engines), blocks)),
            )
        return table


@contextlib.contextmanager
def watching(console: Console, scenario: ResolvedScenario, world: World) -> Iterator[None]:
    """Draw on this terminal for as long as the block runs, and leave nothing there."""
    with Live(
        console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
    ) as live:
        watcher = Watcher(live, scenario, world)
        watcher.draw()
        world.clients.on_end.append(watcher.ended)
        try:
            yield
        finally:
            world.clients.on_end.remove(watcher.ended)


def _ms(ordered: Sequence[float], percent: int) -> str:
    """Return the sample at that rank, which is enough to watch."""
    return f"{formatting.number(ordered[(len(ordered) - 1) * percent // 100])} ms" if ordered else "-"


def _short(name: str) -> str:
    return formatting.plain(name if len(name) <= 20 else name[:19] + "…")
