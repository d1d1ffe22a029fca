"""`pdflow simulate`: builds a world, runs it, prints the report and writes the files.

A run follows no clock of the machine: one is read here only to print a speed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from rich.console import Console, RenderableType

from pdflow.cost.step import StepCost
from pdflow.errors import EXIT_DONE, EXIT_INTERRUPTED, InvariantError, before_simulating
from pdflow.protocol.errors import InvariantViolated
from pdflow.protocol.invariants.oracle import Oracle
from pdflow.results.command_line import command_line
from pdflow.results.files.bench_json import CostStatement, RunHeader, content_sha256
from pdflow.results.files.events import EventsHeader, EventsWriter, writing_events
from pdflow.results.files.timeline import timeline
from pdflow.results.files.write import (
    EVENTS_NAME,
    PAGE_NAME,
    SCENARIO_NAME,
    TIMELINE_NAME,
    make_folder,
    write_text,
    write_timeline,
)
from pdflow.results.page.page import page
from pdflow.results.recording import Recording
from pdflow.results.result import Result
from pdflow.results.totals import EngineTotals, LinkTotals
from pdflow.scenario.costs.step_costs import kind_of
from pdflow.scenario.reading.content import content_of
from pdflow.scenario.reading.editable import Scenario
from pdflow.scenario.schema.fields import seconds_to_ns
from pdflow.scenario.schema.scenario import ResolvedScenario
from pdflow.scenario.schema.workload import ClosedArrival
from pdflow.scenario.summary import trace_note
from pdflow.scenario.validation.resolution import resolution_of
from pdflow.version import version
from pdflow.workload.build import burstiness_of, rate_of, requests
from pdflow_sim.build import SimulationBuilder
from pdflow_sim.nodes.node import Observer
from pdflow_sim.observe.live_table import watching
from pdflow_sim.observe.liveness import Watch, assert_all_ended
from pdflow_sim.observe.obligations import ObligationChecker
from pdflow_sim.observe.recording import Recorder
from pdflow_sim.uncollected import uncollected
from pdflow_sim.world import World


@attrs.frozen(kw_only=True)
class RunOptions:
    """The options of the command, besides the scenario."""

    out: Path | None = None
    exact: bool = False
    events: bool = False
    check_invariants: bool = False
    save_detailed: bool = False
    timeline: bool = False
    html: bool = False
    quiet: bool = False
    drain: bool = False
    """Run on after the last answer until nothing is left to happen: no lease, no timer. For checks, not for figures."""


@attrs.define
class SimulationRun:
    """A finished or interrupted run."""

    result: Result
    world: World
    exit_code: int


def simulate(
    scenario: ResolvedScenario,
    *,
    command: Sequence[str] = (),
    out: str | None = None,
    written: Scenario | None = None,
    **flags: bool,
) -> SimulationRun:
    """Run the command: simulate with progress, print the report, write the files. The exit code is in the answer.

    `written`: the same scenario as it was written, which is saved with the results, for `pdflow explain`.

    Raises InvariantError if an invariant does not hold, ScenarioError for a trace that turns out malformed, OutputError
    if the disk refuses.
    """
    options = RunOptions(out=None if out is None else Path(out), **flags)
    if options.out is not None:
        make_folder(options.out)
    text = _text_of(scenario) if options.html else ""
    console = stderr_console()
    if not options.quiet:
        for note in scenario.notes:
            console.print(f"note: {note}", style="dim")
    with contextlib.ExitStack() as stack:
        observers: list[Observer] = []
        if options.events and options.out is not None:
            header = EventsHeader(world="simulated", scenario=scenario.name, seed=scenario.seed)
            writer = stack.enter_context(writing_events(options.out / EVENTS_NAME, header))
            observers.append(_recording(writer))
        with before_simulating():
            world, oracle = prepare(scenario, options, observers)
        if not options.quiet and console.is_terminal:
            stack.enter_context(watching(console, scenario, world))
        began = time.process_time()
        interrupted = run(world, oracle, options.drain or options.check_invariants)
        spent = time.process_time() - began
    # A first signal that comes now must not lose the results; one after a run that was interrupted already ends it.
    signals: contextlib.AbstractContextManager[list[int]]
    signals = contextlib.nullcontext([]) if interrupted else _signals_stop(world)
    with signals as later:
        result = conclude(scenario, world, command, interrupted)
        if options.out is not None:
            _write(result, world, options, text)
            if written is not None:
                write_text(options.out / SCENARIO_NAME, written.text_for(options.out))
        if not options.quiet:
            print_report(result.table())
            _print_end(console, result, options.out, spent)
    return SimulationRun(result, world, EXIT_INTERRUPTED if interrupted or later else EXIT_DONE)


def _write(result: Result, world: World, options: RunOptions, scenario_text: str) -> None:
    """Write the files of the run into its folder."""
    assert options.out is not None
    header = result.header
    result.save(options.out, detailed=options.save_detailed)
    recording = Recording() if world.recorder is None else world.recorder.recording(world.fabric.paths.names)
    if options.timeline:
        metadata = {"scenario": header.scenario_name, "seed": header.seed, "interrupted": header.interrupted}
        write_timeline(options.out / TIMELINE_NAME, timeline(result.records, recording), metadata)
    if options.html:
        write_text(options.out / PAGE_NAME, page(result, scenario_text, recording))


def _print_end(console: Console, result: Result, out: Path | None, spent: float) -> None:
    """Print the run's speed, where its files are, and whether they are of a part of the run."""
    requests = len(result.records)
    speed = requests / spent if spent else 0.0
    console.print(f"{requests:,} requests in {spent:.1f} CPU s: {speed:,.0f} per CPU second", style="dim")
    if out is not None:
        console.print(f"written to {out}", style="dim", soft_wrap=True)
    if result.header.interrupted:
        ended = result.metrics.completed
        done = f"{ended:,} requests had completed" if ended else "no request had completed yet"
        console.print(f"interrupted: the results are partial; {done}", style="yellow")


def _text_of(scenario: ResolvedScenario) -> str:
    """Return the text of the scenario's file, for a page that shows it; "" if there is no file, or no longer."""
    try:
        return Path(scenario.path).read_text(encoding="utf-8-sig", errors="replace")
    except (OSError, ValueError):
        return ""


def stderr_console() -> Console:
    """Return the console of progress and notes, which prints texts as they are."""
    return Console(stderr=True, highlight=False, markup=False, emoji=False)


def print_report(report: RenderableType) -> None:
    """Print the report to stdout. A reader that closes the pipe early is no error."""
    try:
        _Stdout(highlight=False).print(report)
        sys.stdout.flush()
    except BrokenPipeError:
        _silence_stdout()


class _Stdout(Console):
    def on_broken_pipe(self) -> None:
        self.quiet = True
        _silence_stdout()


def _silence_stdout() -> None:
    """Redirect stdout to the null device, so that what is still buffered does not fail once more when the interpreter
    flushes it at its end (exit code 120).
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def prepare(
    scenario: ResolvedScenario,
    options: RunOptions,
    observers: list[Observer],
    costs: Mapping[str, StepCost] | None = None,
) -> tuple[World, Oracle | None]:
    """Build a world whose workload is ready to arrive, and the oracle that checks it, if one was asked for.

    `costs` replace the step costs of the pools that they name.
    """
    builder = SimulationBuilder(
        scenario, options.exact, Recorder() if options.timeline or options.html else None, costs
    )
    world = builder.build()
    oracle = None
    if options.check_invariants:
        oracle = builder.oracle()
        observers = [*observers, oracle.observe if world.faults is None else world.faults.observer(oracle)]
        ObligationChecker(world, oracle)
        if scenario.faults and scenario.fault_table.heal_s is not None:
            Watch(world, seconds_to_ns(scenario.fault_table.heal_s), resolution_of(scenario))
    if observers:
        world.watch(observers[0] if len(observers) == 1 else _all_of(observers))
    open_workload(scenario, world)
    return world, oracle


def open_workload(scenario: ResolvedScenario, world: World) -> None:
    """Let the requests of the workload arrive from now on."""
    if world.sessions is not None:
        world.sessions.begin()
    else:
        world.clients.open(requests(scenario.workload, scenario.seed, scenario.base_dir))


def run(world: World, oracle: Oracle | None, drain: bool) -> bool:
    """Run the world to its end. True if it was interrupted."""
    try:
        with uncollected(), _signals_stop(world) as interrupted:
            world.clock.run()
            if not interrupted:
                assert_all_ended(world)
            if drain and not interrupted:
                if world.faults is not None:
                    world.faults.end_faults()
                world.clock.run()
        if oracle is not None and not interrupted:
            oracle.finish(world.clock.now)
            world.assert_empty()
    except InvariantViolated as broken:
        raise InvariantError(str(broken)) from broken
    if interrupted:
        world.totals.duration_ns = world.clock.now
    return bool(interrupted)


@contextlib.contextmanager
def _signals_stop(world: World) -> Iterator[list[int]]:
    """Make Ctrl-C end the run after a whole turn, so that its totals are consistent; a second one ends it at once. The
    list that is yielded fills when the first one comes. SIGTERM does the same where it raises KeyboardInterrupt, as in
    the command. Does nothing where a signal means something else already.
    """
    interrupts: list[int] = []
    before = signal.default_int_handler
    in_main_thread = threading.current_thread() is threading.main_thread()
    ours = [each for each in (signal.SIGINT, signal.SIGTERM) if in_main_thread and signal.getsignal(each) is before]

    def restore() -> None:
        for each in ours:
            signal.signal(each, before)

    def stop(number: int, _: Any) -> None:
        interrupts.append(number)
        world.clock.stop()
        restore()

    for each in ours:
        signal.signal(each, stop)
    try:
        yield interrupts
    finally:
        restore()


def conclude(scenario: ResolvedScenario, world: World, command: Sequence[str], interrupted: bool) -> Result:
    """Return the result: add up what the world holds."""
    totals, now, posting = world.totals, world.totals.duration_ns, world.fabric.posting_ns
    network = world.fabric.network
    totals.world_events = world.clock.turns
    totals.messages = world.fabric.messages
    for name, resource, capacity in world.fabric.paths.names:
        carried, busy = network.carried_bytes(resource, world.clock.now), network.busy_ns(resource, world.clock.now)
        totals.links.append(LinkTotals(name=name, bytes=carried, busy_ns=busy, capacity_bytes_per_s=capacity))
    totals.faults = [] if world.faults is None else world.faults.acted
    for rank, ns in posting.items():
        lanes = world.fabric.ports[rank].lanes_free
        ahead = sum([max(0, free - now) for free in lanes])  # ordered, and not posted when the run ended
        totals.posting_ns[rank] = max(0, ns - ahead) // len(lanes)
    for node in (*world.prefills, *world.decodes):
        pool = world.fabric.paths.pool_of[node.name]
        queries, hits = node.prefix_cache()
        totals.engines.append(
            EngineTotals(
                name=node.name,
                role=pool.role,
                busy_ps=node.busy_ps(now),
                gpus=pool.gpus_per_engine,
                kv_blocks=node.engine.pool.num_blocks,
                peak_kv_blocks=node.peak_blocks,
                prefix_cache_queries=queries,
                prefix_cache_hits=hits,
                max_num_seqs=pool.max_num_seqs * pool.attention_replicas,
                up_ns=None if world.scaling is None else world.scaling.up_ns(node.name),
            )
        )
    return Result.of(run_header(scenario, world.costs, command, interrupted), world.records, world.steps, totals)


def run_header(
    scenario: ResolvedScenario, costs: Mapping[str, StepCost], command: Sequence[str], interrupted: bool
) -> RunHeader:
    """Return the header of the result: what was run. `costs` by pool."""
    arrival = scenario.workload.arrival
    statements = []
    for pool in scenario.pools:
        cost = costs[pool.name]
        bar = ", ".join(f"{name.upper()} {value}".removeprefix("ALL ") for name, value in cost.rel_error.items())
        statements.append(
            CostStatement(
                pool=pool.name,
                model=kind_of(pool),
                provenance=cost.provenance,
                error_bar=bar,
            )
        )
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    return RunHeader(
        scenario_name=scenario.name,
        scenario_sha256=content_sha256(content_of(scenario)),
        seed=scenario.seed,
        version=version(),
        command_line=command_line(list(_repeatable(command))) if command else "",
        model_id=scenario.model.name,
        request_rate_rps=rate_of(scenario.workload, scenario.base_dir),
        burstiness=burstiness_of(arrival),
        max_concurrency=arrival.concurrency if isinstance(arrival, ClosedArrival) else None,
        source_date_epoch=int(epoch) if epoch and epoch.isdigit() else None,
        slo=scenario.slo,
        workload_note="" if scenario.workload.trace is None else trace_note(scenario.workload.trace),
        class_slos=scenario.slo.classes,
        warmup_ns=seconds_to_ns(scenario.workload.warmup_s),
        costs=tuple(statements),
        interrupted=interrupted,
    )


_OF_FILES = frozenset({"--quiet", "--events", "--timeline", "--html", "--save-detailed"})


def _repeatable(command: Sequence[str]) -> Iterator[str]:
    """Yield the command without the options that say what to write, and where: they do not change the result. Equal
    runs into two folders must not differ, and an option that asks for a file does not run without a folder.
    """
    skip = False
    for argument in command:
        if skip:
            skip = False
        elif argument == "--out":
            skip = True
        elif argument not in _OF_FILES and not argument.startswith("--out="):
            yield argument


def _recording(writer: EventsWriter) -> Observer:
    def observe(node: str, event: Any, effects: tuple[Any, ...], now: int) -> None:
        writer.event(now, node, event)
        writer.effects(now, node, effects)

    return observe


def _all_of(observers: list[Observer]) -> Observer:
    def observe(node: str, event: Any, effects: tuple[Any, ...], now: int) -> None:
        for observer in observers:
            observer(node, event, effects, now)

    return observe
