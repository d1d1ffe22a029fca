"""What a pair adds to one vLLM's latency: python -m benchmarks.vllm.latency [--columns NAMES] [--rounds N] [options]

Each round starts every column in turn, alone and each connector's pair, and measures all four cells, interleaved; so a
drift of the machine meets all columns. One request at a time, fresh random prompts, float32, greedy, by the client's
clock. Printed per cell: medians and 90th percentiles in ms; both legs apart; what remains of a pair's time less alone's
and less that of a one-token request whose prompt D has cached, which is what a second leg through vLLM's HTTP server
costs; milliseconds per decode step; CPU of idle instances in percent of a core.
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

from benchmarks.vllm.client import Client, two_legs
from benchmarks.vllm.connectors import NAMES
from benchmarks.vllm.instances import Instance, Options, alone, default_work, pair
from benchmarks.vllm.model import prompt
from benchmarks.vllm.processes import cpu_s

CELLS: Final = ((100, 1), (100, 16), (1000, 1), (1000, 16))
COLUMNS: Final = "none,stock-push,stock-push+progress,pdflow-push,pdflow-pull"
BLOCK: Final = 128
WARM_UPS: Final = 3
IDLE_S: Final = 10.0
STEPS: Final = 400
TIMEOUT_S: Final = 20.0


@attrs.define
class Samples:
    """Seconds, of one column and one cell, over all rounds."""

    whole: list[float] = attrs.field(factory=list)
    prefill: list[float] = attrs.field(factory=list)
    decode: list[float] = attrs.field(factory=list)
    cached: list[float] = attrs.field(factory=list)
    failed: int = 0


@attrs.define
class Column:
    """All that was measured of one column."""

    cells: dict[tuple[int, int], Samples] = attrs.field(factory=lambda: defaultdict(Samples))
    step_s: list[float] = attrs.field(factory=list)
    idle: dict[str, list[float]] = attrs.field(factory=lambda: defaultdict(list))
    """Share of a core, by role."""


async def measure(column: Column, p: Client | None, d: Client, samples: int, name: str) -> None:
    """Measure each cell `samples` times, interleaved. `p`: None for one vLLM alone."""
    # Whole blocks and one token: all but that token is in the prefix cache the second time.
    cached = {size: prompt(-(-size // BLOCK) * BLOCK + 1, f"cached/{name}/{size}") for size, _ in CELLS}
    for tokens in cached.values():
        await d.complete(tokens, 1, timeout_s=TIMEOUT_S)
    for index in range(-WARM_UPS, samples):
        for cell in CELLS:
            tokens, max_tokens = prompt(cell[0], f"latency/{name}/{index}/{cell}"), cell[1]
            found = column.cells[cell] if index >= 0 else Samples()
            if p is None:
                reply = await d.complete(tokens, max_tokens, timeout_s=TIMEOUT_S)
                ok, whole = reply.ok, reply.seconds
            else:
                legs = await two_legs(p, d, tokens, max_tokens, timeout_s=TIMEOUT_S)
                ok, whole = legs.ok, legs.seconds
                if legs.d is not None and ok:
                    found.prefill.append(legs.p.seconds)
                    found.decode.append(legs.d.seconds)
            if not ok:
                found.failed += 1
                continue
            found.whole.append(whole)
            found.cached.append((await d.complete(cached[cell[0]], 1, timeout_s=TIMEOUT_S)).seconds)


async def measure_steps(column: Column, d: Client, name: str) -> None:
    """Measure a decode step: of a plain request, with the connector loaded."""
    tokens = prompt(20, f"steps/{name}")
    first = await d.complete(tokens, 1, timeout_s=TIMEOUT_S)
    long = await d.complete(tokens, STEPS + 1, timeout_s=60.0)
    if first.ok and long.ok:
        column.step_s.append((long.seconds - first.seconds) / STEPS)


async def measure_idle(column: Column, *those: Instance) -> None:
    """Measure the CPU time that instances take without a request."""
    await trio.sleep(2.0)
    before = {each.role: cpu_s(each.pids) for each in those}
    await trio.sleep(IDLE_S)
    for each in those:
        column.idle[each.role].append((cpu_s(each.pids) - before[each.role]) / IDLE_S)


async def run(arguments: argparse.Namespace) -> int:
    columns = {name: Column() for name in arguments.columns.split(",")}
    for name in columns:
        if name not in NAMES:
            raise SystemExit(f"no column is called {name!r}; there are {', '.join(NAMES)}")
    for number in range(arguments.rounds):
        for name, column in columns.items():
            seed = f"{name}/{number}"
            if name == "none":
                async with alone(Options(core="1"), arguments.work) as one:
                    await measure(column, None, one.client, arguments.samples, seed)
                    await measure_steps(column, one.client, seed)
                    await measure_idle(column, one)
            else:
                options = [Options(connector=name, core=core) for core in "01"]
                async with pair(*options, arguments.work) as (p, d):
                    await measure(column, p.client, d.client, arguments.samples, seed)
                    await measure_steps(column, d.client, seed)
                    await measure_idle(column, p, d)
            print(f"round {number + 1}: {name} done", file=sys.stderr, flush=True)
    print(report(columns))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(raw(columns), indent=2))
    return int(any(cell.failed for column in columns.values() for cell in column.cells.values()))


def raw(columns: dict[str, Column]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, column in columns.items():
        cells = {f"{size}/{output}": attrs.asdict(cell) for (size, output), cell in column.cells.items()}
        found[name] = {"cells": cells, "step_s": column.step_s, "idle": dict(column.idle)}
    return found


def ms(values: list[float]) -> str:
    """Return the median and the 90th percentile, in ms."""
    if not values:
        return "-"
    ninetieth = quantiles(values, n=10)[-1] if len(values) > 1 else values[0]
    return f"{median(values) * 1000:.1f} / {ninetieth * 1000:.1f}"


def report(columns: dict[str, Column]) -> str:
    """Return the tables as Markdown: medians / 90th percentiles in ms."""
    heads = [f"{size}/{output}" for size, output in CELLS]
    rows = ["median / p90 in ms", "", f"| column | {' | '.join(heads)} | failed |", f"|{' --- |' * (len(CELLS) + 2)}"]
    for name, column in columns.items():
        failed = sum(cell.failed for cell in column.cells.values())
        rows.append(f"| {name} | {' | '.join(ms(column.cells[cell].whole) for cell in CELLS)} | {failed} |")
    plain = columns.get("none")
    for name, column in columns.items():
        if name == "none":
            continue
        for leg in ("prefill", "decode", "cached"):
            title = f"{name}: {leg} leg" if leg != "cached" else f"{name}: one token, prompt cached at D"
            rows.append(f"| {title} | {' | '.join(ms(getattr(column.cells[cell], leg)) for cell in CELLS)} | |")
        if plain is not None:
            rows.append(f"| {name}: what remains | {' | '.join(_rest(column, plain, cell) for cell in CELLS)} | |")
    rows += ["", "| column | ms per decode step | idle CPU, % of a core |", "| --- | --- | --- |"]
    for name, column in columns.items():
        idle = ", ".join(f"{role} {median(values) * 100:.1f}" for role, values in column.idle.items())
        rows.append(f"| {name} | {ms(column.step_s)} | {idle} |")
    return "\n".join(rows)


def _rest(column: Column, plain: Column, cell: tuple[int, int]) -> str:
    """Return a pair's time less alone's and less a cached one-token request's, by medians and 90th percentiles."""
    found, one = column.cells[cell], plain.cells[cell]
    if not (found.whole and one.whole and found.cached):
        return "-"
    less = median(one.whole) + median(found.cached)
    return ms([value - less for value in found.whole])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--columns", default=COLUMNS, help=f"of {', '.join(NAMES)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=15, help="per cell, column and round")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--work", type=Path, default=default_work())
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(trio.run(run, parse()))
