"""The verdict of a plan in words: on one screen of a terminal, and as Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

import attrs
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from pdflow.results import formatting
from pdflow.results.figures.service_level import ATTAINMENT
from pdflow_sim.plan.comparison import DesignComparison
from pdflow_sim.plan.designs import Design
from pdflow_sim.plan.levers import gain_text
from pdflow_sim.plan.outcome import PlanOutcome
from pdflow_sim.plan.robustness import StressResult
from pdflow_sim.plan.search import MeasuredDesign, Target

WIDEST: Final = 80
PER_S: Final = "requests/s"
_LABEL: Final = 17
_ROWS: Final = 10
_LEVERS: Final = 4
_BAR: Final = 24
_LEAST_GAIN: Final = 0.03
_LONG_RUN: Final = 10.0
"""A run should last so many times as long as one request."""


@attrs.frozen
class PlanVerdict:
    """The verdict of a plan; prints with rich, at most 80 columns wide."""

    outcome: PlanOutcome

    @property
    def headline(self) -> str:
        """The answer in one sentence."""
        outcome = self.outcome
        best = outcome.best
        if best is None and outcome.unfinished:
            return "Nothing is known yet: no run had ended."
        if best is None:
            return f"There is no cluster of {gpus_text(outcome.gpus)} to try."
        if not outcome.decided:
            return f"Not decided yet. Best so far: {best.design.text}, {_number(best.rate)} requests/s."
        if best.rate == 0:
            missed = f"the best misses it by {_times(best.scale)}"
            return f"No design on {gpus_text(outcome.gpus)} meets the service level at any rate; {missed}."
        if not outcome.meets:
            return f"No design found serves {outcome.wanted_rate:g} {PER_S}; the best serves {_number(best.rate)}."
        if outcome.verdict is None:
            return f"Best: {best.design.text}."
        return _answer(outcome.verdict, outcome.goal.target)

    def facts(self) -> Iterator[tuple[str, str]]:
        """Yield the rows below the headline: a label and a text."""
        outcome, best = self.outcome, self.outcome.best
        if best is None:
            yield from self._end()
            return
        for kind in ("aggregated", "disaggregated"):
            row = outcome.best_of(kind)
            if row is not None:
                yield kind, self._row_text(row)
        if best.rate > 0:
            yield "rate", self._headroom(best)
        else:
            yield "misses", "; ".join(_misses(best))
        binding = list(self._binding())
        if binding:
            yield "bound by", "; ".join(binding)
        yield from self._losses(best)
        yield from self._sure()
        yield from self._end()

    def _end(self) -> Iterator[tuple[str, str]]:
        outcome = self.outcome
        if outcome.left_out:
            yield "not in it", f"{outcome.left_out} of the scenario"
        if outcome.unfinished:
            yield "not finished", f"{outcome.unfinished}; this is the best so far"
        yield from (("left out", text) for text in _refusals(outcome))
        yield "simulated", f"{outcome.simulated:,} requests in {outcome.runs:,} runs"

    def levers(self) -> list[tuple[str, float]]:
        """Return what would help, by name, and the gain of each; those without one are left out."""
        return [(it.lever.name, it.gain) for it in self.outcome.levers if it.gain >= _LEAST_GAIN][:_LEVERS]

    def stresses(self) -> tuple[list[Design], list[tuple[str, list[str]]]]:
        """Return the finalists, and what each survives: a row for each stress, a cell for each finalist."""
        designs = list(self.outcome.stresses)
        names = dict.fromkeys(it.stress.name for results in self.outcome.stresses.values() for it in results)
        rows = []
        for name in names:
            cells = []
            for design in designs:
                found = next((it for it in self.outcome.stresses[design] if it.stress.name == name), None)
                cells.append("" if found is None else _stress_text(found))
            rows.append((name, cells))
        return designs, rows

    def columns(self) -> list[str]:
        """Return the headings of the table of designs."""
        price = ["$ per M\noutput"] if self.outcome.goal.prices else []
        return [
            "",
            "cluster",
            "max\nreq/s",
            "tok/s\n/GPU",
            "tok/s\n/user",
            "TTFT\np99 ms",
            "ITL\np99 ms",
            *price,
        ]

    def table(self) -> list[list[str]]:
        """Return the best designs, a row each, as `columns`."""
        rows = []
        for rank, each in enumerate(self.outcome.table(_ROWS), start=1):
            row = each.row
            tokens, tpot = row.per_second("output_tokens_per_s"), row.figure("tpot_mean_ms")
            price = self.outcome.dollars_per_million(row)
            cells = [
                str(rank),
                row.design.text + (f" (or {len(each.also)} alike)" if each.also else ""),
                row.rate_text,
                "-" if not tokens else _number(tokens / row.design.gpus),
                "-" if not tpot else _number(1000 / tpot),
                _figure(row.figure("ttft_p99_ms")),
                _figure(row.figure("itl_p99_ms")),
                *([_figure(price)] if self.outcome.goal.prices else []),
            ]
            rows.append(cells)
        return rows

    def _row_text(self, row: MeasuredDesign) -> str:
        seeds = "" if len(row.rates) < 2 else f" ({_number(min(row.rates))} to {_number(max(row.rates))})"
        price = self.outcome.dollars_per_million(row)
        dollars = "" if price is None else f", ${_number(price)} per million output tokens"
        met = row.figure("slo_attainment")
        within = "" if met is None else f"; {formatting.percent(met)} of requests meet all bounds themselves"
        return f"{row.design.text}: {_number(row.rate)}{seeds} {PER_S}{within}{dollars}"

    def _headroom(self, best: MeasuredDesign) -> str:
        outcome = self.outcome
        own = outcome.wanted_rate or outcome.traffic.rate
        share = own / best.rate
        load = f"{_number(own)} {PER_S} asked for" if outcome.wanted_rate else f"the scenario's {_number(own)}"
        if share > 1:
            text = f"{load} cannot be served; the highest is {_number(best.rate)} {PER_S}"
        else:
            text = f"{load} is {formatting.percent(share)} of the highest, {_number(best.rate)} {PER_S}"
        span, service = (best.figure("requests") or best.requests) / best.rate, best.figure("e2e_mean_ms")
        if service is not None and span < _LONG_RUN * service / 1000:
            text += f"; runs last only {span:.0f} s there, so use more requests (--requests)"
        return text

    def _binding(self) -> Iterator[str]:
        helping = [it for it in self.outcome.levers if it.gain >= _LEAST_GAIN]
        if self.outcome.levers and not helping:
            yield "nothing that was tried: no single resource helps"
        for result in helping[:1]:
            yield f"{result.lever.resource} ({result.lever.name}: {gain_text(result.gain)})"

    def _losses(self, best: MeasuredDesign) -> Iterator[tuple[str, str]]:
        for result in self.outcome.stresses.get(best.design, ()):
            text = _loss_text(result) if result.stress.lost else None
            if text is not None:
                yield f"{result.stress.name}", text

    def _sure(self) -> Iterator[tuple[str, str]]:
        outcome, verdict = self.outcome, self.outcome.verdict
        if verdict is not None and math.isfinite(verdict.ratio):
            texts = []
            if verdict.low is not None and verdict.high is not None:
                texts.append(f"{_times(verdict.ratio)}, 95 % interval {_times(verdict.low)} to {_times(verdict.high)}")
            texts.append(f"step times may be off by {verdict.step_error * 100:.0f} %")
            for name, ratio in outcome.ratio_at.items():
                if math.isinf(ratio):
                    texts.append(f"with steps {name} the other serves no rate")
                else:
                    texts.append(f"{_times(ratio)} with steps {name}" + (", which turns it round" if ratio < 1 else ""))
            yield "how sure", "; ".join(texts)
        if outcome.never_compared:
            yield "never compared", f"with a measurement: step times of {'; '.join(outcome.never_compared)}"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, WIDEST)
        options = options.update(width=width)
        outcome = self.outcome
        title = Text(f"{outcome.scenario.name}", style="bold")
        title.append(f" on {gpus_text(outcome.gpus)}: {outcome.level}", style="not bold dim")
        yield from console.render(title, options)
        yield from console.render(Text(f"\n{self.headline}\n", style="bold"), options)
        for name, text in self.facts():
            yield from _labelled(console, options, name, text)
        helping = self.levers()
        if helping:
            yield from console.render(Text("\nWhat would help  highest rate with one change", style="bold"), options)
            most, width = max(gain for _, gain in helping), max(len(name) for name, _ in helping) + 1
            sign = "#" if options.ascii_only else "█"
            for name, gain in helping:
                bar = sign * max(1, round(_BAR * gain / most))
                yield from console.render(Text(f"{name:<{width}}{gain_text(gain):>8}  {bar}"), options)
        designs, rows = self.stresses()
        if rows:
            yield from console.render(self._stress_table(designs, rows), options)
        if outcome.rows:
            yield from console.render(self._design_table(), options)

    def _stress_table(self, designs: Sequence[Design], rows: Sequence[tuple[str, list[str]]]) -> Table:
        grid = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim", title=None)
        grid.add_column(Text("\nSurvives", style="bold"))
        for design in designs:
            rate = f"at {_number(self.outcome.stress_rate(design))}/s"
            grid.add_column(Text(f"{design.shape_text}\n{rate}"), overflow="fold")
        for name, cells in rows:
            grid.add_row(name, *(Text(cell, style="" if cell.startswith("yes") else "yellow") for cell in cells))
        return grid

    def _design_table(self) -> Table:
        grid = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
        for number, heading in enumerate(self.columns()):
            text = f"\n{heading}" if "\n" not in heading else heading
            grid.add_column(Text(text), justify="left" if number < 2 else "right", overflow="fold")
        for row in self.table():
            grid.add_row(*map(Text, row))
        return grid

    def markdown(self) -> str:
        """Return the verdict as Markdown."""
        outcome = self.outcome
        lines = [f"# {outcome.scenario.name} on {gpus_text(outcome.gpus)}", "", f"Service level: {outcome.level}.", ""]
        lines += [f"**{self.headline}**", ""]
        lines += [f"- {name}: {text}" for name, text in self.facts()]
        helping = self.levers()
        if helping:
            lines += ["", "## What would help", "", "| one change | highest rate |", "| --- | ---: |"]
            lines += [f"| {name} | {gain_text(gain)} |" for name, gain in helping]
        designs, rows = self.stresses()
        if rows:
            heads = [f"{design.shape_text} at {_number(outcome.stress_rate(design))}/s" for design in designs]
            lines += ["", "## What it survives", "", *_markdown_table(["", *heads], [[n, *c] for n, c in rows])]
        lines += ["", "## The best designs", ""]
        lines += _markdown_table([heading.replace("\n", " ") for heading in self.columns()], self.table())
        lines += ["", "A rate with ~ is of one seed, on shorter runs."]
        return "\n".join(lines) + "\n"


def _answer(verdict: DesignComparison, target: Target) -> str:
    better, other = verdict.better.design, verdict.other.design
    do = "Disaggregate" if better.kind == "disaggregated" else "Do not disaggregate"
    if math.isinf(verdict.ratio):
        return f"{do}: {other.kind} engines meet the service level at no rate."
    per = " per dollar" if target == "cost" else "" if better.gpus == other.gpus else " per GPU"
    gain = f"{better.text} serves {_times(verdict.ratio)} the rate{per} of {other.text}"
    if verdict.tied_by_seeds:
        return f"A tie: {gain}, and other seeds may turn that round."
    if verdict.tied_by_costs:
        return f"A tie: {gain}, less than the error of step times."
    return f"{do}: {gain}."


def gpus_text(count: int) -> str:
    """Return a number of GPUs in words."""
    return "1 GPU" if count == 1 else f"{formatting.count(count)} GPUs"


def _misses(best: MeasuredDesign) -> Iterator[str]:
    """Yield the terms that the best design misses, by how much."""
    figures = best.outcomes[0].figures if best.outcomes else {}
    for name, value in figures.items():
        if name.startswith("scale.") and (value is None or value > 1):
            term = name.removeprefix("scale.")
            what = "all bounds together" if term == ATTAINMENT else term
            yield f"{what}: {'too many requests fail' if value is None else f'{_times(value)} the bound'}"


def _refusals(outcome: PlanOutcome) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for engine, reason in outcome.refused.items():
        reasons.setdefault(reason, []).append(engine)
    return [f"{', '.join(engines)}: {reason}" for reason, engines in reasons.items()]


def _stress_text(result: StressResult) -> str:
    outcome = result.outcome
    if outcome is None:
        return "no: it is the only one"
    if outcome.error is not None:
        return f"no: {outcome.error}"
    return "yes" if outcome.meets else "no: too many fail" if math.isinf(outcome.scale) else f"no, {outcome.scale:.2f}x"


def _loss_text(result: StressResult) -> str | None:
    """Return what the loss of an engine did to the requests after it; None if there was none to lose."""
    figures = {} if result.outcome is None else result.outcome.figures
    after, before = figures.get("ttft_p99_after_ms"), figures.get("ttft_p99_before_ms")
    if after is None:
        return None
    text = f"TTFT p99 {formatting.duration(round(after * 1e6))} in the minute after it"
    text += "" if before is None else f", {formatting.duration(round(before * 1e6))} before"
    recovered = figures.get("recovered_s")
    text += "; no recovery within the run" if recovered is None else f"; {recovered:.0f} s to recover"
    return text + f"; {figures.get('failed_after') or 0:,} requests failed"


def _labelled(console: Console, options: ConsoleOptions, name: str, text: str) -> RenderResult:
    for position, line in enumerate(Text(text).wrap(console, max(20, options.max_width - _LABEL))):
        line.rstrip()
        label = f"{'' if position else name:<{_LABEL}}"
        yield from console.render(Text.assemble((label, "bold"), line), options)


def _markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [
        f"| {' | '.join(heads)} |",
        f"|{' --- |' * len(heads)}",
        *(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows),
    ]


def _times(ratio: float) -> str:
    return "infinitely" if math.isinf(ratio) else f"{ratio:.2f} times"


def _number(value: float) -> str:
    return formatting.number(value)


def _figure(value: float | None) -> str:
    return "-" if value is None else formatting.number(value)
