"""The printed explanation of one request: its path, what each stage waited for, and the what-ifs. For 80 columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from pdflow.results import formatting
from pdflow.results.explanation.columns import WIDEST, paragraph, tables, waits
from pdflow.results.explanation.inter_token import WorstItl, milliseconds
from pdflow.results.explanation.path import RequestPath
from pdflow.results.explanation.recorded import RecordedRun
from pdflow.results.explanation.simulated import LeftOut, SimulatedRequest, WhatIf
from pdflow.results.records import STAGES


@attrs.frozen(kw_only=True)
class RequestExplanation:
    """The explanation of one request's TTFT, or with `itl` of its worst inter-token latency.

    `unchanged` is the request in a simulation of the same run, which equals its record; without it there are no
    what-ifs, for the reason in `no_what_ifs`.
    """

    run: RecordedRun
    path: RequestPath
    itl: bool = False
    unchanged: SimulatedRequest | None = None
    no_what_ifs: str = ""
    what_ifs: Sequence[WhatIf] = ()
    left_out: Sequence[LeftOut] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return all of it for --json, times in ns."""
        unchanged = self.unchanged
        return {
            "run": str(self.run.folder),
            "scenario": self.run.name,
            "seed": self.run.seed,
            **self.path.as_dict(),
            "worst_itl": None if unchanged is None or unchanged.itl is None else unchanged.itl.as_dict(),
            "free_blocks": None if unchanged is None or unchanged.memory is None else attrs.asdict(unchanged.memory),
            "simulated": None
            if unchanged is None
            else {"requests": unchanged.arrived, "until_ns": unchanged.until_ns, "runs": 1 + len(self.what_ifs)},
            "what_ifs": [what_if.as_dict() for what_if in self.what_ifs],
            "left_out": [attrs.asdict(each) for each in self.left_out],
            **({"no_what_ifs": self.no_what_ifs} if self.no_what_ifs else {}),
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, WIDEST)
        of_latency = self._of_itl(width) if self.itl else self._of_ttft(width)
        for element in (*self._heading(width), "", *of_latency, *self._end(width)):
            yield from console.render(element, options.update(width=width))

    def _heading(self, width: int) -> Iterator[Text]:
        path = self.path
        engines = dict.fromkeys(name for name in (path.prefill_engine, path.decode_engine) if name is not None)
        where = f", on {' and '.join(engines)}" if engines else ""
        title = f"request {path.request}"
        lengths = f"{formatting.count(path.input_tokens)} tokens in, {formatting.count(path.output_tokens)} out"
        arrived = f"arrived at {path.arrival_ns / 1e9:,.3f} s"
        of = f"of {formatting.plain(self.run.name)}, seed {self.run.seed}"
        for line in paragraph(f"{title} {of}: {lengths}, {arrived}{formatting.plain(where)}", width):
            line.highlight_regex(f"^{title}", "bold")
            yield line
        retried = f" after {path.attempts} attempts" if path.attempts > 1 else ""
        if path.outcome != "completed":
            reason = f": {formatting.plain(path.reason)}" if path.reason else ""
            verb = {"failed": "It", "cancelled": "It was"}.get(path.outcome, "The run was interrupted; it is")
            after = ""
            if self.unchanged is not None and path.outcome != "unfinished":
                after = f" {formatting.duration(self.unchanged.until_ns - path.arrival_ns)} after it arrived"
            yield from paragraph(f"{verb} {path.outcome}{after}{retried}{reason}.", width)
        elif retried:
            yield Text(f"It was completed{retried}.")
        if path.stopped_in is not None:
            # D's tokens are recorded when the answer is whole.
            later = ", or while its answer was generated" if path.stopped_in == STAGES[-1] else ""
            yield Text(f"It has no first token on record: it stopped in {path.stopped_in}{later}.")

    def _of_ttft(self, width: int) -> Iterator[RenderableType]:
        path = self.path
        whole = path.known_ns
        columns = [("as it was", [row.duration_ns for row in path.rows], path.ttft_ns)]
        columns += [(each.name, list(each.simulated.durations_ns), each.simulated.ttft_ns) for each in self.what_ifs]
        shares = [formatting.percent(row.duration_ns / whole) if whole else "0 %" for row in path.rows]
        total = "TTFT" if path.ttft_ns is not None else "so far"
        largest = max([whole, *(sum(durations) for _, durations, _ in columns)]) / 1e6
        digits = formatting.decimals_for(largest)

        def text(ns: int | None) -> str:
            return "-" if ns is None else f"{ns / 1e6:,.{digits}f}"

        cells: list[tuple[str, list[str]]] = []
        for position, (name, durations, ttft_ns) in enumerate(columns):
            stages = [text(ns) for ns in durations] if durations else ["-"] * len(STAGES)
            cells.append((name, [*stages, text(whole if position == 0 else ttft_ns)]))
            if position == 0:
                cells.append(("share", [*shares, "100 %" if whole else "0 %"]))
        yield from tables("ms", [*STAGES, total], cells, width)
        yield from _ends(self.what_ifs)
        yield ""
        yield from waits([(row.stage, row.wait.text) for row in path.rows if row.wait is not None], width)

    def _of_itl(self, width: int) -> Iterator[RenderableType]:
        worst = None if self.unchanged is None else self.unchanged.itl
        if worst is None:
            if self.unchanged is not None:
                yield Text("It has no inter-token latency: it was not completed, or has one token.")
                return
            why = formatting.plain(self.no_what_ifs)
            yield from paragraph(f"Its worst inter-token latency is not known: {why}", width)
            return
        found: list[tuple[str, WorstItl | None]] = [("as it was", worst)]
        found += [(each.name, each.simulated.itl) for each in self.what_ifs]
        cells = [(name, _itl_cells(itl)) for name, itl in found]
        yield from tables("ms", ["worst ITL", "median ITL", "token", "sequences", "prompt tokens"], cells, width)
        yield from _ends(self.what_ifs)
        yield ""
        since = f"from {worst.begin_ns / 1e9:,.3f} s on"
        waited = f"it waited {milliseconds(worst.duration_ns)} for token {worst.token}, {since}"
        yield from waits([("worst ITL", f"{waited}: {worst.text}")], width)

    def _end(self, width: int) -> Iterator[RenderableType]:
        if self.what_ifs:
            yield ""
            for each in self.what_ifs:
                yield Text(f"{each.name}: {each.change}", style="dim")
        for left in self.left_out:
            yield from paragraph(f"{left.name} is left out: {formatting.plain(left.reason)}", width, "dim")
        if self.unchanged is not None:
            arrived = formatting.count(self.unchanged.arrived)
            until = formatting.duration(self.unchanged.until_ns)
            runs = f"{1 + len(self.what_ifs)} times, once unchanged" if self.what_ifs else "once, unchanged"
            text = f"Simulated {runs}: the run until this request had ended, {until} with {arrived} requests. "
            yield from paragraph(f"{text}Unchanged, it equals its record to the nanosecond.", width, "dim")
        elif self.no_what_ifs and not self.itl:
            yield ""
            yield from paragraph(f"No what-ifs: {formatting.plain(self.no_what_ifs)}", width)


def _ends(what_ifs: Sequence[WhatIf]) -> Iterator[Text]:
    """Yield how the request ended where a change made it fail."""
    for each in what_ifs:
        record = each.simulated.record
        if record is None or record["outcome"] != "completed":
            yield Text(f"{each.name}: {formatting.plain(each.simulated.end)}", style="yellow")


def _itl_cells(itl: WorstItl | None) -> list[str]:
    if itl is None:
        return ["-"] * 5
    return [
        formatting.number(itl.duration_ns / 1e6),
        formatting.number(itl.median_ns / 1e6),
        formatting.count(itl.token),
        formatting.count(itl.sequences),
        formatting.count(sum(tokens for _, tokens in itl.prompts)),
    ]
