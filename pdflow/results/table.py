"""The report that a run prints at its end: one table of the headline figures, and a waterfall of TTFT by stage.

It shows what `metrics` and `totals` hold and computes nothing of its own. Made for 80 columns, for a pipe, for
NO_COLOR and for terminals without Unicode: meaning never rests on colour, and every sign has an ASCII form.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import attrs
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from pdflow.results import formatting
from pdflow.results.figures.aftermath import Aftermath
from pdflow.results.figures.batches import mean_batch
from pdflow.results.figures.metrics import Metrics
from pdflow.results.figures.slo import SloTargets
from pdflow.results.figures.spread import Spread
from pdflow.results.files.bench_json import RunHeader, statements
from pdflow.results.steps import Steps
from pdflow.results.totals import NS_PER_S, Totals

LATENCY_COLUMNS = ("mean", "p50", "p90", "p99")
CLASS_COLUMNS = ("requests", "goodput/s", "SLO met", "TTFT p50", "p99", "TPOT p50", "p99")

_WIDEST = 96
_LABEL = 13
_BAR_CELLS = (" ", "▏", "▎", "▍", "▌", "▋", "▊", "▉", "█")
_EIGHTHS = 8
_REASONS_SHOWN = 4
_LINKS_SHOWN = 3
_FAULTS_SHOWN = 3
_BUSY_LANE = 0.7
"""The share of its time from which on a rank that posts delays transfers noticeably: they queue for it."""


@attrs.frozen
class Report:
    """The printed report of a run, for rich: `console.print(Report(header, metrics, totals))`.

    Of a live run, seen from outside, there are no `totals` and no `steps`; `late` is how long after its arrival each
    request was sent.
    """

    header: RunHeader
    metrics: Metrics
    totals: Totals | None
    late: Spread | None = None
    steps: Mapping[str, Steps] = attrs.field(factory=dict)
    aftermaths: Sequence[Aftermath] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        options = options.update(width=min(options.max_width, _WIDEST))
        signs = _Signs.of(options)
        for renderable in (
            self._title(signs),
            "",
            self._latencies(),
            *(("", self._classes()) if self.metrics.classes else ()),
            "",
            *self._facts(console, options, signs),
            *(("", *self._waterfall(options, signs)) if self._saw_stages else ()),
        ):
            yield from console.render(renderable, options)

    def __str__(self) -> str:
        """Return the plain text at 80 columns."""
        return self.text()

    def text(self, width: int = 80, *, ascii_only: bool = False) -> str:
        """Return the report without colours, for a file, a test or a notebook."""
        console = Console(
            width=width, color_system=None, force_terminal=False, force_jupyter=False, legacy_windows=False
        )
        options = console.options
        options.encoding = "ascii" if ascii_only else "utf-8"
        lines = console.render_lines(self, options, pad=False)
        return "".join("".join(segment.text for segment in line) + "\n" for line in lines)

    @property
    def _saw_stages(self) -> bool:
        return bool(self.metrics.stages) and (self.totals is not None or self.metrics.completed > 0)

    def _title(self, signs: _Signs) -> Text:
        line = Text(self.header.scenario_name or "run", style="bold")
        ran = f"{formatting.count(self.metrics.requests)} requests in {formatting.duration(self.metrics.duration_ns)}"
        line.append(
            f" {signs.dot} seed {self.header.seed} {signs.dot} {ran} of {self.header.kind_of_time}",
            style="not bold dim",
        )
        if self.header.interrupted:
            line.append(f" {signs.dot} interrupted, partial", style="not dim bold yellow")
        return line

    def latency_rows(self) -> list[tuple[str, ...]]:
        """Return the rows of TTFT, TPOT, ITL and E2E: name, mean, p50, p90 and p99 in ms; dashes if no samples."""
        spreads = (
            ("TTFT", self.metrics.ttft),
            ("TPOT", self.metrics.tpot),
            ("ITL", self.metrics.itl),
            ("E2E", self.metrics.e2e),
        )
        rows = [(name, row.count, (row.mean_ms, row.p50_ms, row.p90_ms, row.p99_ms)) for name, row in spreads]
        largest = max(max(figures) for _, _, figures in rows)
        digits = 3 if largest < 10 else 2 if largest < 100_000 else 1 if largest < 10_000_000 else 0
        return [
            (name, *(f"{figure:,.{digits}f}" if count else "-" for figure in figures)) for name, count, figures in rows
        ]

    def class_rows(self) -> Iterator[tuple[str, ...]]:
        """Yield a row per class: its name, then the values of CLASS_COLUMNS."""
        for name, row in self.metrics.classes.items():
            slo = (
                ("", "")
                if row.slo is None
                else (formatting.number(row.slo.goodput_rps), formatting.percent(row.slo.attainment))
            )
            times = (
                formatting.number(time) if spread.count else "-"
                for spread in (row.ttft, row.tpot)
                for time in (spread.p50_ms, spread.p99_ms)
            )
            yield name or "(none)", formatting.count(row.requests), *slo, *times

    def facts(self) -> Iterator[tuple[str, str]]:
        """Yield the figures below the latencies: a name, and a line."""
        for name, value in self._fact_rows(_Signs(False, "·", "·")):
            yield name, str(value)

    def _latencies(self) -> Table:
        table = Table(box=None, padding=(0, 0), pad_edge=False, header_style="dim")
        table.add_column("ms", width=_LABEL, style="bold")
        for name in LATENCY_COLUMNS:
            table.add_column(name, justify="right", width=11)
        for row in self.latency_rows():
            table.add_row(*row)
        return table

    def _classes(self) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
        table.add_column("class", style="bold", overflow="fold")
        for name in CLASS_COLUMNS:
            table.add_column(name, justify="right")
        for name, *figures in self.class_rows():
            table.add_row(Text(name), *figures)
        return table

    def _facts(self, console: Console, options: ConsoleOptions, signs: _Signs) -> Iterator[Text]:
        for name, value in self._fact_rows(signs):
            text = value if isinstance(value, Text) else Text(value)
            for position, line in enumerate(text.wrap(console, max(20, options.max_width - _LABEL))):
                line.rstrip()
                yield Text.assemble((f"{'' if position else name:<{_LABEL}}", "bold"), line)

    def _fact_rows(self, signs: _Signs) -> Iterator[tuple[str, str | Text]]:
        header, metrics, separator = self.header, self.metrics, f" {signs.dot} "
        if header.warmup_ns:
            began = (
                f"first {formatting.duration(header.warmup_ns)}: {formatting.count(metrics.warming)} requests served"
            )
            whole = "" if self.totals is None else "; bytes, links and engines cover the whole run"
            yield "warm-up", Text(f"{began}, not counted{whole}", style="dim")
        yield "throughput", separator.join(_rates(metrics))
        yield from _slo_rows(header, metrics, separator)
        if self.totals is not None:
            yield from _inside_rows(self.totals, self.steps, signs)
        yield from _outcome_rows(metrics, separator)
        yield from _aftermath_rows(self.aftermaths, separator)
        if self.late is not None and self.late.count:
            late = (self.late.mean_ms, self.late.p99_ms, self.late.max_ms)
            mean, p99, worst = (formatting.number(figure) for figure in late)
            yield "sent late", Text(f"mean {mean} ms{separator}p99 {p99} ms{separator}max {worst} ms", style="dim")
        if header.workload_note:
            yield "workload", Text(header.workload_note, style="dim")
        for statement in statements(header.costs):
            yield "step times", Text(statement, style="dim")

    def _waterfall(self, options: ConsoleOptions, signs: _Signs) -> Iterator[RenderableType]:
        whole = self.metrics.ttft.mean_ms
        heading = Text("Where TTFT went", style="bold")
        if not whole:
            yield heading.append(": no request received a first token, or TTFT was zero", style="not bold dim")
            return
        yield heading.append(f"  mean of {formatting.count(self.metrics.ttft.count)} requests", style="not bold dim")
        digits = formatting.decimals_for(whole)
        bar = max(10, options.max_width - _LABEL - 24)
        begin = 0.0
        for stage, spread in self.metrics.stages.items():
            end = begin + spread.mean_ms
            line = Text(f"{stage:<{_LABEL}}", no_wrap=True)
            line.append(f"{spread.mean_ms:>10,.{digits}f} ms ", style="" if spread.mean_ms else "dim")
            line.append(f"{formatting.percent(spread.mean_ms / whole):>8}  ", style="dim")
            line.append(signs.bar(begin / whole, end / whole, bar), style="cyan")
            line.rstrip()
            yield line
            begin = end


@attrs.frozen
class _Signs:
    """The few non-ASCII signs of the report, and their replacements where the terminal has none."""

    ascii_only: bool
    dot: str
    times: str

    @staticmethod
    def of(options: ConsoleOptions) -> _Signs:
        return _Signs(True, "-", "*") if options.ascii_only else _Signs(False, "·", "·")

    def bar(self, begin: float, end: float, cells: int) -> str:
        """Return a bar from one share of the width to another; one that is not empty shows in at least one cell."""
        if end <= begin:
            return ""
        left = min(int(begin * cells), cells - 1)
        if self.ascii_only:
            return " " * left + "#" * max(1, min(round(end * cells), cells) - left)
        eighths = max(1, min(round(end * cells * _EIGHTHS), cells * _EIGHTHS) - left * _EIGHTHS)
        full, rest = divmod(eighths, _EIGHTHS)
        return " " * left + _BAR_CELLS[-1] * full + (_BAR_CELLS[rest] if rest else "")


def _rates(metrics: Metrics) -> Iterator[str]:
    yield f"{formatting.number(metrics.per_second(metrics.completed))} requests/s"
    yield f"{formatting.number(metrics.per_second(metrics.output_tokens))} output tokens/s"
    yield f"{formatting.number(metrics.per_second(metrics.input_tokens + metrics.output_tokens))} tokens/s in total"


def _inside_rows(totals: Totals, steps: Mapping[str, Steps], signs: _Signs) -> Iterator[tuple[str, str | Text]]:
    """Yield the rows that no client can measure: bytes moved, links, GPUs, prefix hits, stranded KV."""
    separator = f" {signs.dot} "
    yield "bytes moved", f"{formatting.size(totals.bytes_moved)} in {formatting.count(totals.transfers)} transfers"
    yield from _link_rows(totals, separator)
    yield from _posting_rows(totals)
    yield "in steps", separator.join(_in_steps(totals, role) for role in totals.roles()) or "no engines"
    if batches := [text for role in totals.roles() if (text := _mean_batch(totals, steps, role))]:
        yield "mean batch", separator.join(batches)
    peaks = {role: peak for role in totals.roles() if (peak := totals.peak_kv_share(role)) is not None}
    if peaks:
        shares = separator.join(f"{role} {formatting.percent(peak)}" for role, peak in peaks.items())
        yield "KV peak", f"{shares} of the fullest engine's blocks"
    if totals.prefix_cache()[1]:
        yield (
            "prefix hits",
            separator.join(_prefix_hits(totals, role) for role in totals.roles() if totals.prefix_cache(role)[0]),
        )
    held = totals.stranded_byte_ns / NS_PER_S
    average = totals.stranded_byte_ns / totals.duration_ns if totals.duration_ns else 0.0
    yield "stranded KV", f"{formatting.size(held)}{signs.times}s{separator}{formatting.size(average)} held on average"


def _in_steps(totals: Totals, role: str) -> str:
    gpus = sum(engine.gpus for engine in totals.of_role(role))
    busy = formatting.percent(totals.gpu_busy_share(role))
    whose = "GPU's" if gpus == 1 else "GPUs'"
    return f"{role} {busy} of {formatting.count(gpus)} {whose} time"


def _mean_batch(totals: Totals, steps: Mapping[str, Steps], role: str) -> str:
    """Return the mean batch of a role's engines, and the most that fits into one; "" for those that only prefill."""
    engines = totals.of_role(role)
    batch = mean_batch(steps, engines)
    if batch is None:
        return ""
    most = max(engine.max_num_seqs for engine in engines)
    return f"{role} {batch:,.1f}{f' of at most {formatting.count(most)}' if most else ''} sequences"


def _prefix_hits(totals: Totals, role: str) -> str:
    queries, hits = totals.prefix_cache(role)
    return f"{role} {formatting.percent(hits / queries)} of {formatting.count(queries)} prompt tokens"


def _slo_rows(header: RunHeader, metrics: Metrics, separator: str) -> Iterator[tuple[str, str | Text]]:
    if header.slo is None or metrics.slo is None:
        yield "goodput", Text("no SLO given", style="dim")
        return
    slo = header.slo
    bounds = {"ttft": slo.ttft_ms, "tpot": slo.tpot_ms, "itl": slo.itl_ms, "e2e": slo.e2e_ms}
    names = {name: name.upper() for name in bounds}
    if slo.itl_ms is not None and not header.class_slos:
        names["itl"] = itl_name(slo)
    yield "goodput", f"{formatting.number(metrics.slo.goodput_rps)} requests/s"
    attainments = []
    for name, attained in metrics.slo.by_metric.items():
        bound = f" <= {bounds[name]:g} ms" if bounds[name] is not None and not header.class_slos else ""
        attainments.append(f"{names[name]}{bound} {formatting.percent(attained)}")
    yield "SLO met by", separator.join((f"{formatting.percent(metrics.slo.attainment)} of requests", *attainments))
    if metrics.stalled_share is not None:
        bound = "the bound on ITL" if header.class_slos else f"{slo.itl_ms:g} ms"
        stalled = f"{formatting.percent(metrics.stalled_share)} of decode time in waits longer than {bound}"
        yield "stalled", stalled


def itl_name(slo: SloTargets) -> str:
    """Return the name of what an SLO bounds of a request's inter-token latencies."""
    return "max ITL" if slo.itl_percentile >= 100 else f"p{slo.itl_percentile:g} ITL"


def _link_rows(totals: Totals, separator: str) -> Iterator[tuple[str, str | Text]]:
    busiest = totals.busiest_links(_LINKS_SHOWN)
    if not busiest:
        yield "links", Text("no data went over a link", style="dim")
        return
    shown = [
        f"{link.name} {formatting.percent(link.utilisation(totals.duration_ns))}"
        if link.capacity_bytes_per_s
        else f"{link.name} unlimited, {formatting.size(link.bytes)}"
        for link in busiest
    ]
    used = sum(1 for link in totals.links if link.bytes)
    if used > len(shown):
        shown.append(f"and {used - len(shown)} more")
    yield "link use", separator.join(shown)


def _posting_rows(totals: Totals) -> Iterator[tuple[str, str | Text]]:
    rank, busy = totals.busiest_lane()
    if busy > _BUSY_LANE:
        remedy = "larger blocks need fewer descriptors, more engines share them"
        yield "posting", Text(f"{rank} {formatting.percent(busy)} of its time: {remedy}", style="yellow")


def _outcome_rows(metrics: Metrics, separator: str) -> Iterator[tuple[str, str | Text]]:
    yield "completed", f"{formatting.count(metrics.completed)} of {formatting.count(metrics.requests)}"
    if metrics.wrong_kv is not None:
        share = f"{formatting.count(metrics.wrong_kv)} of {formatting.count(metrics.completed)} completed"
        yield "wrong KV", Text(share, style="yellow" if metrics.wrong_kv else "")
    for outcome in ("failed", "cancelled"):
        if metrics.outcomes[outcome]:
            ranked = list(metrics.reasons[outcome].items())
            reasons = [f"{reason} {formatting.count(times)}" for reason, times in ranked[:_REASONS_SHOWN]]
            if len(ranked) > _REASONS_SHOWN:
                reasons.append(f"{len(ranked) - _REASONS_SHOWN} other reasons")
            text = Text(formatting.count(metrics.outcomes[outcome]), style="yellow")
            yield outcome, text.append(separator + separator.join(reasons), style="not dim default")
    if metrics.outcomes["unfinished"]:
        yield "unfinished", formatting.count(metrics.outcomes["unfinished"])


def _aftermath_rows(aftermaths: Sequence[Aftermath], separator: str) -> Iterator[tuple[str, str | Text]]:
    for each in aftermaths[:_FAULTS_SHOWN]:
        fault, before, after = each.fault, each.ttft_before, each.ttft_after
        where = f" of {fault.engine}" if fault.engine else ""
        ttft = f"TTFT p99 {formatting.number(after.p99_ms)} ms after it" if after.count else "no TTFT after it"
        earlier = f", {formatting.number(before.p99_ms)} ms before" if before.count else ""
        failed = f"{formatting.count(each.failed)} of {formatting.count(each.affected)} failed"
        if each.recovered_ns is None:
            recovery = "recovery unknown"
        elif each.recovered_ns:
            recovery = f"recovered after {formatting.duration(each.recovered_ns)}"
        else:
            recovery = "recovered at once"
        figures = (f"{fault.name}{where} at {formatting.duration(fault.begin_ns)}: {ttft}{earlier}", failed, recovery)
        yield "fault", separator.join(figures)
    if len(aftermaths) > _FAULTS_SHOWN:
        yield "faults", Text(f"{len(aftermaths) - _FAULTS_SHOWN} more in results.json", style="dim")
