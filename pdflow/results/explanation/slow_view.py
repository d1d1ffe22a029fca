"""The printed explanation of a run: what p99 TTFT and the worst ITL are made of, and the requests that show it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from pdflow.results import formatting
from pdflow.results.command_line import command_line
from pdflow.results.explanation.columns import WIDEST, paragraph, tables, waits
from pdflow.results.explanation.inter_token import milliseconds
from pdflow.results.explanation.recorded import RecordedRun
from pdflow.results.explanation.slow import Example, SlowRequests
from pdflow.results.records import STAGES


@attrs.frozen(kw_only=True)
class RunExplanation:
    """The explanation of a run's slowest requests."""

    run: RecordedRun
    found: SlowRequests

    def command(self, example: Example) -> str:
        """Return the command that explains a request."""
        itl = ["--itl"] if example.itl else []
        return command_line(["explain", str(self.run.folder), str(example.request), *itl])

    def as_dict(self) -> dict[str, Any]:
        """Return all of it for --json, times in ns."""
        found = self.found.as_dict()
        for example, row in zip(self.found.examples, found["examples"], strict=True):
            row["command"] = self.command(example)
        return {"run": str(self.run.folder), "scenario": self.run.name, "seed": self.run.seed, **found}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, WIDEST)
        for element in self._elements(width):
            yield from console.render(element, options.update(width=width))

    def _elements(self, width: int) -> Iterator[RenderableType]:
        run, found = self.run, self.found
        title = Text(formatting.plain(run.name) or "run", style="bold")
        of = f"{formatting.count(found.completed)} requests completed"
        yield title.append(f", seed {run.seed}: {of}{'; interrupted, partial' if run.interrupted else ''}", style="dim")
        yield ""
        slow = "the slowest request" if found.slow == 1 else f"the {formatting.count(found.slow)} slowest requests"
        yield Text("What p99 TTFT is made of", style="bold")
        yield Text(f"Means of {slow} (from {milliseconds(found.least_ttft_ns)} on) and of all:")
        whole_slow, whole_all = sum(found.slow_ns), sum(found.all_ns)
        digits = formatting.decimals_for(max(whole_slow, whole_all) / 1e6)
        cells = []
        for name, means, whole in (("slowest", found.slow_ns, whole_slow), ("all", found.all_ns, whole_all)):
            cells.append((name, [f"{mean / 1e6:,.{digits}f}" for mean in (*means, whole)]))
            cells.append(("share", [formatting.percent(mean / whole) if whole else "0 %" for mean in (*means, whole)]))
        yield from tables("ms", [*STAGES, "TTFT"], cells, width)
        yield ""
        itl = found.itl
        if itl is None:
            yield from paragraph(f"The worst ITL is not known: {formatting.plain(found.no_itl)}", width)
        else:
            of_request = (
                f"{milliseconds(itl.duration_ns)}, token {itl.token} of request {itl.request}, whose median is "
            )
            text = f"{of_request}{milliseconds(itl.median_ns)}: {itl.text}"
            yield from waits([("worst ITL", text)], width)
        yield ""
        yield Text("Requests that show it", style="bold")
        for example in found.examples:
            yield Text(f"r{example.request}: {example.why}")
            yield Text(f"  {formatting.plain(self.command(example))}", style="dim")
