"""What a pair adds to one vLLM's latency: python -m benchmarks.vllm.latency [--columns NAMES] [--rounds N] [options]

All columns, alone and each connector's pair, run at the same time and are measured in turn, sample by sample, so that a
drift of the machine meets them alike. Between two columns nothing is sent for a second, in which vLLM's workers still
poll for work. Connectors with NIXL's progress thread, which never rests, run by themselves at the end.

One request at a time, fresh random prompts, float32, greedy, by the client's clock. Printed per cell: medians and 90th
percentiles in ms; both legs apart; what remains of a pair's time less alone's and less that of a one-token request
whose prompt D has cached, each of the same turn: that is what a second leg through vLLM's HTTP server costs; what a
pair's request takes more than the same two legs without a transfer, which also has the second instance's share of the
machine: its worker polls on a core for 1 s after its leg; milliseconds per decode step; CPU of idle instances in
percent of a core.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final

import attrs
import trio

from benchmarks.vllm.client import two_legs
from benchmarks.vllm.connectors import NAMES
from benchmarks.vllm.instances import Instance, Options, default_work, instances
from benchmarks.vllm.model import prompt
from benchmarks.vllm.processes import cpu_s

CELLS: Final = ((100, 1), (100, 16), (1000, 1), (1000, 16))
COLUMNS: Final = "none,stock-push,stock-push+progress,pdflow-push,pdflow-pull"
BLOCK: Final = 128
WARM_UPS: Final = 2
IDLE_S: Final = 10.0
REST_S: Final = 1.1
"""vLLM's workers call sched_yield in a loop for 1 s after each step (shm_broadcast.SpinCondition)."""
STEPS: Final = 400
TIMEOUT_S: Final = 20.0


@attrs.frozen
class Sample:
    """Seconds of one request, and of a one-token request to the same D behind it, whose prompt D has cached."""

    whole: float
    cached: float
    prefill: float = 0.0
    decode: float = 0.0
    control: float = 0.0
    """Of the same legs without a transfer: a plain request to P, and one to D whose prompt D has cached."""


@attrs.define
class Column:
    """All that was measured of one column."""

    name: str
    cells: dict[tuple[int, int], list[Sample | None]] = attrs.field(factory=lambda: defaultdict(list))
    """By turn; None where the request failed."""
    step_s: list[float] = attrs.field(factory=list)
    idle: dict[str, list[float]] = attrs.field(factory=lambda: defaultdict(list))
    """Share of a core, by role."""

    def samples(self, cell: tuple[int, int]) -> list[Sample]:
        return [each for each in self.cells[cell] if each is not None]

    @property
    def failed(self) -> int:
        return sum(each is None for cell in self.cells.values() for each in cell)


@attrs.frozen
class Running:
    """The instances of a column. `p`: None for one vLLM alone."""

    column: Column
    p: Instance | None
    d: Instance

    @property
    def instances(self) -> tuple[Instance, ...]:
        return (self.d,) if self.p is None else (self.p, self.d)


def started(column: Column, work: Path) -> Running:
    name = column.name
    if name == "none":
        return Running(column, None, Instance("alone", "alone", Options(core="1"), work))
    p, d = (
        Instance(f"{name}-{role[0]}", role, Options(connector=name, core=core), work)
        for role, core in (("prefill", "0"), ("decode", "1"))
    )
    return Running(column, p, d)


def cached_prompt(name: str, cell: tuple[int, int]) -> list[int]:
    """Return a prompt of whole blocks and one token: all but that token is in the prefix cache the second time."""
    return prompt(-(-cell[0] // BLOCK) * BLOCK + 1, f"cached/{name}/{cell[0]}")


async def measure(it: Running, cell: tuple[int, int], seed: str) -> Sample | None:
    """Send one request, and one whose prompt is cached. Return None if the first one fails."""
    tokens, max_tokens = prompt(cell[0], f"latency/{it.column.name}/{seed}/{cell}"), cell[1]
    prefill = decode = control = 0.0
    known = cached_prompt(it.column.name, cell)
    if it.p is None:
        reply = await it.d.client.complete(tokens, max_tokens, timeout_s=TIMEOUT_S)
        ok, whole = reply.ok, reply.seconds
    else:
        legs = await two_legs(it.p.client, it.d.client, tokens, max_tokens, timeout_s=TIMEOUT_S)
        ok, whole = legs.ok, legs.seconds
        if legs.d is not None:
            prefill, decode = legs.p.seconds, legs.d.seconds
    if not ok:
        return None
    cached = await it.d.client.complete(known, 1, timeout_s=TIMEOUT_S)
    if it.p is not None:
        await trio.sleep(REST_S)
        plain = prompt(cell[0], f"control/{it.column.name}/{seed}/{cell}")
        for client, each, output in ((it.p.client, plain, 1), (it.d.client, known, max_tokens)):
            control += (await client.complete(each, output, timeout_s=TIMEOUT_S)).seconds
    return Sample(whole, cached.seconds, prefill, decode, control)


async def measure_steps(it: Running) -> None:
    """Measure a decode step: of a plain request, with the connector loaded."""
    tokens = prompt(20, f"steps/{it.column.name}/{len(it.column.step_s)}")
    first = await it.d.client.complete(tokens, 1, timeout_s=TIMEOUT_S)
    long = await it.d.client.complete(tokens, STEPS + 1, timeout_s=60.0)
    if first.ok and long.ok:
        it.column.step_s.append((long.seconds - first.seconds) / STEPS)


async def measure_idle(those: list[Running]) -> None:
    """Measure the CPU time that instances take without a request."""
    await trio.sleep(2.0)
    pids = {(each.column.name, one.role): one.pids for each in those for one in each.instances}
    before = {key: cpu_s(value) for key, value in pids.items()}
    await trio.sleep(IDLE_S)
    for each in those:
        for one in each.instances:
            key = each.column.name, one.role
            each.column.idle[one.role].append((cpu_s(pids[key]) - before[key]) / IDLE_S)


async def measure_all(columns: list[Column], number: int, arguments: argparse.Namespace) -> None:
    """Run these columns at the same time, for one round."""
    those = [started(column, arguments.work) for column in columns]
    async with instances(*[one for each in those for one in each.instances]):
        for each in those:
            for cell in CELLS:
                await each.d.client.complete(cached_prompt(each.column.name, cell), 1, timeout_s=TIMEOUT_S)
        for index in range(-WARM_UPS, arguments.samples):
            for cell in CELLS:
                for each in those:
                    await trio.sleep(REST_S)
                    sample = await measure(each, cell, f"{number}/{index}")
                    if index >= 0:
                        each.column.cells[cell].append(sample)
        for each in those:
            await trio.sleep(REST_S)
            await measure_steps(each)
        await measure_idle(those)
    print(f"round {number + 1}: {', '.join(each.name for each in columns)} done", file=sys.stderr, flush=True)


async def run(arguments: argparse.Namespace) -> int:
    columns = [Column(name) for name in arguments.columns.split(",")]
    for column in columns:
        if column.name not in NAMES:
            raise SystemExit(f"no column is called {column.name!r}; there are {', '.join(NAMES)}")
    resting = [each for each in columns if "+progress" not in each.name]
    together = [resting, *([each] for each in columns if "+progress" in each.name)]
    for number in range(arguments.rounds):
        for group in filter(None, together):
            await measure_all(group, number, arguments)
    print(report(columns))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([raw(each) for each in columns], indent=2))
    return int(any(each.failed for each in columns))


def raw(column: Column) -> dict[str, Any]:
    cells = {
        f"{size}/{output}": [each and attrs.asdict(each) for each in samples]
        for (size, output), samples in column.cells.items()
    }
    return {"name": column.name, "cells": cells, "step_s": column.step_s, "idle": dict(column.idle)}


def ms(values: list[float]) -> str:
    """Return the median and the 90th percentile, in ms."""
    if not values:
        return "-"
    ninetieth = quantiles(values, n=10)[-1] if len(values) > 1 else values[0]
    return f"{median(values) * 1000:.1f} / {ninetieth * 1000:.1f}"


def report(columns: list[Column]) -> str:
    """Return the tables as Markdown: medians / 90th percentiles in ms."""
    heads = [f"{size}/{output}" for size, output in CELLS]
    rows = ["median / p90 in ms", "", f"| column | {' | '.join(heads)} | failed |", f"|{' --- |' * (len(CELLS) + 2)}"]
    for column in columns:
        rows.append(_row(column.name, [[each.whole for each in column.samples(cell)] for cell in CELLS], column.failed))
    plain = next((each for each in columns if each.name == "none"), None)
    for column in columns:
        if column.name == "none":
            continue
        for title, name in (("prefill leg", "prefill"), ("decode leg", "decode"), ("one cached token at D", "cached")):
            values = [[getattr(each, name) for each in column.samples(cell)] for cell in CELLS]
            rows.append(_row(f"{column.name}: {title}", values))
        if plain is not None:
            rows.append(_row(f"{column.name}: what remains", [remains(column, plain, cell) for cell in CELLS]))
        values = [[each.whole - each.control for each in column.samples(cell)] for cell in CELLS]
        rows.append(_row(f"{column.name}: more than the same legs without a transfer", values))
    rows += ["", "| column | ms per decode step | idle CPU, % of a core |", "| --- | --- | --- |"]
    for column in columns:
        idle = ", ".join(f"{role} {median(values) * 100:.1f}" for role, values in column.idle.items())
        rows.append(f"| {column.name} | {ms(column.step_s)} | {idle} |")
    return "\n".join(rows)


def _row(title: str, cells: list[list[float]], failed: int | str = "") -> str:
    return f"| {title} | {' | '.join(map(ms, cells))} | {failed} |"


def remains(column: Column, plain: Column, cell: tuple[int, int]) -> list[float]:
    """Return each turn's time of a pair less that of one vLLM alone, less that of a cached one-token request."""
    turns = zip(column.cells[cell], plain.cells[cell], strict=True)
    return [mine.whole - alone.whole - mine.cached for mine, alone in turns if mine is not None and alone is not None]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--columns", default=COLUMNS, help=f"of {', '.join(NAMES)}")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--samples", type=int, default=30, help="per cell, column and round")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--work", type=Path, default=default_work())
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(trio.run(run, parse()))
