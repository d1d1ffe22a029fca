"""The HTML page of one run: the verdict first, then the figures, the curves, and what was run.

It says what the printed report and results.json say, and takes every figure from where they do. No script, nothing
from elsewhere, no time and no name of a host: equal runs give equal bytes. However long the run was and however many
engines it had, the page stays small: curves have a bounded number of points, tables of rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from pdflow.results import formatting
from pdflow.results.figures.batches import mean_batch
from pdflow.results.finished import FinishedRun
from pdflow.results.page.figures import courses, distributions
from pdflow.results.page.markup import Html, bar, joined, table, tag
from pdflow.results.page.style import STYLE
from pdflow.results.recording import Recording
from pdflow.results.table import CLASS_COLUMNS, LATENCY_COLUMNS
from pdflow.results.totals import EngineTotals, LinkTotals

ROWS_SHOWN: Final = 64
"""The most rows in the tables of engines, of links and of classes."""
SCENARIO_SHOWN: Final = 200_000
"""Characters."""

_ELSEWHERE: Final = frozenset({"link use", "in steps", "step times"})
"""Facts that have tables of their own here."""


_IN_STEPS: Final = (
    "An engine is in steps for as long as it has one sequence to compute. Its mean batch, its KV blocks and the queues "
    "above say how near it is to its limit."
)


def page(result: FinishedRun, scenario_text: str = "", recording: Recording | None = None) -> str:
    """Return the whole file. `scenario_text` is the TOML that was run, as its author wrote it; `recording`, if there is
    one, adds links and KV blocks over time."""
    return document(result.header.scenario_name or "run", _sections(result, scenario_text, recording))


def document(name: str, sections: Iterable[Html], style: str = STYLE) -> str:
    """Return a page of these sections that asks nothing of any network."""
    head = joined(
        (
            Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
            # A browser then refuses whatever a mistake here would let in.
            Html('<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '),
            Html("style-src 'unsafe-inline'\">"),
            tag("title", f"{name} · pdflow"),
            tag("style", Html(style)),
        )
    )
    body = joined(fragment for section in sections for fragment in (section, Html("\n")))
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}</body></html>\n'


def _sections(result: FinishedRun, scenario_text: str, recording: Recording | None) -> Iterator[Html]:
    yield title(result)
    yield verdict(result)
    yield from _figures(result)
    yield from distributions(result)
    yield from stages(result)
    yield from courses(result, recording)
    yield from _use(result)
    yield from _costs(result)
    yield from _origin(result, scenario_text)


def title(result: FinishedRun) -> Html:
    """Return the page's title: the scenario's name, its seed, the requests and how long they took."""
    header, metrics = result.header, result.metrics
    requests = "1 request" if metrics.requests == 1 else f"{formatting.count(metrics.requests)} requests"
    ran = f"{requests} in {formatting.duration(metrics.duration_ns)} of {header.kind_of_time}"
    facts = [f"seed {header.seed}", ran, *([header.model_id] if header.model_id else [])]
    return joined((tag("h1", header.scenario_name or "run"), tag("p", " · ".join(facts), class_="dim")))


def verdict(result: FinishedRun) -> Html:
    """Return the verdict: whether the SLO was met, then the longest stage before the first token, which is what to
    change."""
    metrics = result.metrics
    lines = []
    if result.header.interrupted:
        lines.append(tag("p", tag("b", "Interrupted: the figures cover only a part of the run.")))
    if metrics.slo is None:
        rate = f"{formatting.number(metrics.per_second(metrics.completed))} requests/s"
        lines.append(tag("p", tag("b", rate), "; the scenario has no SLO."))
    else:
        attainment = f"The SLO was met by {formatting.percent(metrics.slo.attainment)} of requests"
        goodput = f": a goodput of {formatting.number(metrics.slo.goodput_rps)} requests/s."
        lines.append(tag("p", tag("b", attainment), goodput))
    if not metrics.ttft.mean_ms:
        lines.append(tag("p", "No request received a first token, or TTFT was zero."))
    else:
        stage, spread = max(metrics.stages.items(), key=lambda item: item[1].mean_ms)
        share = formatting.percent(spread.mean_ms / metrics.ttft.mean_ms).replace(" ", "\N{NO-BREAK SPACE}")
        lines.append(
            tag(
                "p",
                "The longest stage before the first token was ",
                tag("b", stage),
                f": {formatting.number(spread.mean_ms)} of a mean"
                f" {formatting.number(metrics.ttft.mean_ms)} ms, {share}.",
            )
        )
    lost = [f"{formatting.count(number)} {outcome}" for outcome, number in metrics.outcomes.items() if number]
    if metrics.completed < metrics.requests:
        lines.append(tag("p", f"Of {formatting.count(metrics.requests)} requests: {', '.join(lost)}."))
    return tag("div", *lines, class_="verdict")


def _figures(result: FinishedRun) -> Iterator[Html]:
    report = result.table()
    yield tag("h2", "Latencies and rates")
    yield table(["ms", *LATENCY_COLUMNS], report.latency_rows())
    classes = list(report.class_rows())
    if classes:
        yield table(["class", *CLASS_COLUMNS], classes[:ROWS_SHOWN])
        yield from _more(classes)
    rows = [(name, value) for name, value in report.facts() if name not in _ELSEWHERE]
    yield tag("dl", *(fragment for name, value in rows for fragment in (tag("dt", name), tag("dd", value))))


def stages(result: FinishedRun) -> Iterator[Html]:
    """Yield the waterfall of mean TTFT; nothing where there is none."""
    whole = result.metrics.ttft.mean_ms
    if not whole:
        return
    digits = formatting.decimals_for(whole)
    rows, begin = [], 0.0
    for stage, spread in result.metrics.stages.items():
        end = begin + spread.mean_ms
        mean, p50, p99 = (f"{value:,.{digits}f}" for value in (spread.mean_ms, spread.p50_ms, spread.p99_ms))
        share = formatting.percent(spread.mean_ms / whole)
        rows.append((stage, bar(begin / whole, end / whole), mean, share, p50, p99))
        begin = end
    yield tag("h2", "Where the time to first token went")
    yield table(["stage", "on average", "mean ms", "share", "p50", "p99"], rows, text_columns=2)


def _use(result: FinishedRun) -> Iterator[Html]:
    totals = result.totals
    if totals.engines:
        rows = [_engine_row(engine, result) for engine in totals.engines]
        heads = ["engine", "share of the run in steps", "in steps", "mean batch", "of at most"]
        heads += ["GPUs", "most KV blocks in use", "of"]
        yield tag("h2", "Engines")
        yield table(heads, rows[:ROWS_SHOWN], text_columns=2)
        yield from _more(rows)
        yield tag("p", _IN_STEPS, class_="dim")
    links = totals.busiest_links(len(totals.links))
    if links:
        yield tag("h2", "Links")
        rows = [_link_row(link, totals.duration_ns) for link in links]
        heads = ["link", "share of capacity", "used", "carried", "share of time in use"]
        yield table(heads, rows[:ROWS_SHOWN], text_columns=2)
        yield from _more(rows)


def _engine_row(engine: EngineTotals, result: FinishedRun) -> tuple[str, ...]:
    busy = engine.busy_share(result.totals.duration_ns)
    batch = mean_batch(result.steps, [engine])
    sizes = (
        ("", "")
        if batch is None
        else (f"{batch:,.1f}", formatting.count(engine.max_num_seqs) if engine.max_num_seqs else "")
    )
    blocks = formatting.count(engine.kv_blocks) if engine.kv_blocks else "unlimited"
    peak = formatting.count(engine.peak_kv_blocks)
    return engine.name, bar(0, busy), formatting.percent(busy), *sizes, formatting.count(engine.gpus), peak, blocks


def _link_row(link: LinkTotals, duration_ns: int) -> tuple[str, ...]:
    used = link.utilisation(duration_ns)
    shown = formatting.percent(used) if link.capacity_bytes_per_s else "unlimited"
    return link.name, bar(0, used), shown, formatting.size(link.bytes), formatting.percent(link.busy_share(duration_ns))


def _more(rows: Sequence[object]) -> Iterator[Html]:
    if len(rows) > ROWS_SHOWN:
        yield tag("p", f"{formatting.count(len(rows) - ROWS_SHOWN)} more are in results.json.", class_="dim")


def _costs(result: FinishedRun) -> Iterator[Html]:
    if result.header.costs:
        pools: dict[tuple[str, ...], list[str]] = {}
        for cost in result.header.costs:
            pools.setdefault((cost.model, cost.provenance, cost.error_bar), []).append(cost.pool)
        rows = [(", ".join(names), *source) for source, names in pools.items()]
        yield tag("h2", "Step times and their error bars")
        yield table(["pools", "model", "from", "error"], rows[:ROWS_SHOWN], text_columns=4)
        yield from _more(rows)


def _origin(result: FinishedRun, scenario_text: str) -> Iterator[Html]:
    header = result.header
    yield tag("h2", "Run")
    if header.command_line:
        yield tag("pre", tag("code", header.command_line))
    yield tag("p", f"pdflow {header.version} · scenario {header.scenario_sha256[:12]}", class_="dim")
    if scenario_text:
        yield tag("pre", tag("code", scenario_text[:SCENARIO_SHOWN]))
    if len(scenario_text) > SCENARIO_SHOWN:
        yield tag("p", f"Cut after {formatting.count(SCENARIO_SHOWN)} characters.", class_="dim")
