"""What the parts share: scenarios from text, worlds that have run, errors in words, Markdown."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

import attrs

from pdflow.cost.step import StepCost
from pdflow.scenario.reading.load import parse, resolve
from pdflow.scenario.schema.scenario import ResolvedScenario
from pdflow_sim.experiments.calibrate import latencies_ms, ran
from pdflow_sim.world import World

ROOT = Path(__file__).resolve().parents[2]


@attrs.frozen
class Claim:
    """One figure that was asked for: an error, and the most that it should be."""

    what: str
    metric: str
    error: float
    most: float

    @property
    def holds(self) -> bool:
        return self.error <= self.most


@attrs.define
class Found:
    """What one part says: lines of Markdown, and its claims."""

    lines: list[str] = attrs.field(factory=list)
    summary: list[Claim] = attrs.field(factory=list)


def scenario_of(text: str) -> ResolvedScenario:
    """A scenario from its text; paths in it are absolute."""
    return resolve(parse("validation.toml", text))


def world_of(text: str, costs: Mapping[str, StepCost] | None = None) -> World:
    """The world that it becomes."""
    return ran(scenario_of(text), costs or {})


def latencies(world: World) -> list[tuple[float, float]]:
    """(TTFT, TPOT) of every request in ms. All of them must have completed, with more than one token."""
    found = []
    for request in range(len(world.records)):
        ttft, tpot = latencies_ms(world, request)
        assert ttft is not None, f"request {request} did not complete"
        assert tpot is not None, f"request {request} has one token"
        found.append((ttft, tpot))
    return found


def off(simulated: Iterable[float], measured: Iterable[float]) -> list[float]:
    """Signed relative errors."""
    return [a / b - 1 for a, b in zip(simulated, measured, strict=True)]


def error(errors: Sequence[float]) -> float:
    """The median absolute one."""
    return median(map(abs, errors))


def error_text(errors: Sequence[float]) -> str:
    """As tables say it: the median absolute error, and the median signed one."""
    return f"{error(errors):.1%} ({median(errors):+.1%})".replace("%", " %") if errors else "–"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    """Markdown; the first column is text, the others are figures."""
    yield "| " + " | ".join(head) + " |"
    yield "| --- |" + " ---: |" * (len(head) - 1)
    for row in rows:
        yield "| " + " | ".join(map(str, row)) + " |"
    yield ""


def with_section(page: str, heading: str, text: str) -> str:
    """The page with the text of the section of this heading replaced, or with it at the end. Sections begin with ##."""
    before, _, rest = page.partition(f"{heading}\n")
    _, following, after = rest.partition("\n## ")
    return f"{before.rstrip()}\n\n{heading}\n\n{text.strip()}\n{following}{after}"


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
