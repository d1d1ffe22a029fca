"""The page of a plan: the verdict first, as it is printed, then the charts. One file that asks nothing of any network,
has no script and no time, so that equal plans give equal bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from pdflow.results import formatting
from pdflow.results.page.cell import framed
from pdflow.results.page.markup import Html, table, tag
from pdflow.results.page.page import document
from pdflow.results.page.style import STYLE
from pdflow.version import version
from pdflow_sim.plan.levers import gain_text
from pdflow_sim.plan.outcome import PlanOutcome
from pdflow_sim.plan.report.attainment import required_share
from pdflow_sim.plan.report.gains import without_gain
from pdflow_sim.plan.report.plots import ATTAINMENT, FRONTIER, GAINS, HEAT_MAPS, Plot, plots
from pdflow_sim.plan.verdict import PER_S, PlanVerdict, gpus_text

_STYLE: Final = """
.designs td:nth-child(2) { min-width: 11rem; }
.survival td + td { min-width: 9rem; }
@media (max-width: 30rem) {
  .survival td:first-child { position: sticky; left: 0; background: var(--ground) padding-box; }
}
td { vertical-align: top; }
.maps { display: flex; flex-wrap: wrap; gap: 1rem 1.4rem; margin-top: .6rem; }
.foot { margin-top: 2rem; }
figcaption { margin-bottom: .4rem; }
@media print {
  figure, tr, dl, .verdict { break-inside: avoid; }
  h2, h3 { break-after: avoid; }
  .scroll { overflow: visible; }
  .bar i, .verdict { print-color-adjust: exact; }
}
"""


def plan_page(outcome: PlanOutcome) -> str:
    """Return the whole file."""
    return document(outcome.scenario.name or "plan", _sections(outcome), STYLE + _STYLE)


def plan_cell(outcome: PlanOutcome) -> Html:
    """Return the verdict and the tables as the output of a notebook's cell, without the charts."""
    verdict = PlanVerdict(outcome)
    return framed((*_summary(outcome, verdict), *_survival(outcome, verdict), *_designs(verdict)))


def _sections(outcome: PlanOutcome) -> Iterator[Html]:
    verdict = PlanVerdict(outcome)
    yield from _summary(outcome, verdict)
    drawn = plots(outcome)
    yield from _levers(outcome, verdict, drawn)
    yield from _survival(outcome, verdict)
    yield from _designs(verdict)
    yield from _charts(outcome, drawn)
    yield tag("p", f"pdflow {version()} · plan.json has all figures, pareto.csv all runs", class_="dim foot")


def _summary(outcome: PlanOutcome, verdict: PlanVerdict) -> Iterator[Html]:
    yield tag("h1", f"{outcome.scenario.name or 'plan'} on {gpus_text(outcome.gpus)}")
    yield tag("p", f"Service level: {outcome.level}", class_="dim")
    yield tag("div", tag("p", tag("b", verdict.headline)), class_="verdict")
    facts = (pair for name, text in verdict.facts() for pair in (tag("dt", name), tag("dd", text)))
    yield tag("dl", *facts)


def _levers(outcome: PlanOutcome, verdict: PlanVerdict, drawn: Mapping[str, Plot]) -> Iterator[Html]:
    if not outcome.levers:
        return
    rows = [(name, gain_text(gain)) for name, gain in verdict.levers()]
    left = [table(["one change", "gain"], rows) if rows else tag("p", "No single resource helps.")]
    others = without_gain(outcome)
    if others:
        left.append(tag("p", f"Without a gain: {', '.join(it.lever.name for it in others)}.", class_="dim"))
    right = [_figure(drawn[GAINS], _gains_text(outcome))] if GAINS in drawn else []
    yield tag("h2", "What would help")
    yield tag("div", tag("div", *left), *right, class_="charts")


def _survival(outcome: PlanOutcome, verdict: PlanVerdict) -> Iterator[Html]:
    designs, rows = verdict.stresses()
    if rows:
        yield tag("h2", "What it survives")
        rates = (f"at {formatting.number(outcome.stress_rate(design))} {PER_S}" for design in designs)
        heads = ["", *(f"{design.shape_text} {rate}" for design, rate in zip(designs, rates, strict=True))]
        grid = table(heads, [(name, *cells) for name, cells in rows], text_columns=len(heads))
        yield tag("div", grid, class_="survival")


def _designs(verdict: PlanVerdict) -> Iterator[Html]:
    rows = verdict.table()
    if rows:
        yield tag("h2", "The best designs")
        heads = [heading.replace("\n", " ") for heading in verdict.columns()]
        yield tag("div", table(heads, rows, text_columns=2), class_="designs")
        yield tag("p", "A rate with ~ is of one seed, on shorter runs.", class_="dim")


def _charts(outcome: PlanOutcome, drawn: Mapping[str, Plot]) -> Iterator[Html]:
    if FRONTIER in drawn or ATTAINMENT in drawn:
        yield tag("h2", "Runs")
    texts = {FRONTIER: _frontier_text(), ATTAINMENT: _attainment_text(outcome)}
    figures = [_figure(drawn[name], text) for name, text in texts.items() if name in drawn]
    yield tag("div", *figures, class_="charts")
    maps = [_map(drawn[name]) for name in HEAT_MAPS if name in drawn]
    if maps:
        yield tag("h2", f"Highest rate in {PER_S} by numbers of P and D")
        yield tag("p", _maps_text(), class_="dim")
        yield tag("div", *maps, class_="maps")


def _figure(plot: Plot, text: str) -> Html:
    return tag("figure", tag("figcaption", tag("b", plot.title), f": {text}"), plot.picture.inline())


def _map(plot: Plot) -> Html:
    width = plot.picture.width * 1.15
    return tag("figure", tag("figcaption", tag("b", plot.title)), plot.picture.inline(width))


def _frontier_text() -> str:
    return (
        "each mark is a run, up and to the right is better. A line is the frontier of the longest runs of a kind that"
        " meet the service level; shorter runs carry higher rates. The ring is a mean over seeds."
    )


def _attainment_text(outcome: PlanOutcome) -> str:
    text = "the best design of each kind, a mark for each seed and rate. The line is the mean over seeds."
    if required_share(outcome.level) is None:
        text += " The service level demands no such share: its bounds are on percentiles over all requests or tokens."
    return text


def _gains_text(outcome: PlanOutcome) -> str:
    best = outcome.best
    return "" if best is None else f"{best.design.text}, with one resource enlarged at a time."


def _maps_text() -> str:
    return (
        "Each cell is the best design with these numbers of engines, the outlined one the best of all in its map; what"
        " has no cell was not tried. A rate with ~ is of one seed, on shorter runs, which carry higher rates."
    )
