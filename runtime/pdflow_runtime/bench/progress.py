"""The progress display of a benchmark: how far it is, and the last seconds, drawn on a terminal and removed at the end;
a line every few seconds where there is no terminal."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

import trio
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pdflow.protocol.values import Instant, S
from pdflow.results import formatting
from pdflow_runtime.bench.ledger import Ledger

WINDOW_NS: Final = 10 * S
DRAW_S: Final = 0.5
LINE_S: Final = 10.0


class BenchProgress:
    """Shows the progress of a run. Args: `whole` is how many requests there will be, if that is known."""

    def __init__(self, ledger: Ledger, name: str, whole: int | None) -> None:
        self.ledger: Final = ledger
        self.name: Final = name
        self.whole: Final = whole
        self._ended: Final[deque[tuple[Instant, int]]] = deque()
        """The requests that ended in the window, and when."""

    async def show(self, console: Console) -> None:
        """Draw until cancelled."""
        if not console.is_terminal:
            while True:
                await trio.sleep(LINE_S)
                console.print("  ".join(self.look()), highlight=False)
        with Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False) as live:
            while True:
                live.update(self.picture(), refresh=True)
                await trio.sleep(DRAW_S)

    def picture(self) -> Group:
        done, last = self.look()
        line = Table.grid(padding=(0, 2, 0, 0))
        bar = [] if self.whole is None else [ProgressBar(total=self.whole, completed=self.ledger.ended, width=20)]
        line.add_row(Text(formatting.plain(self.name), "bold"), *bar, Text(done))
        return Group(line, Text(last, style="dim"))

    def look(self) -> tuple[str, str]:
        """Return how far the run is, and what the last seconds were like."""
        ledger, now = self.ledger, self.ledger.clock.now()
        self._ended.extend(ledger.recent)
        ledger.recent.clear()
        while self._ended and self._ended[0][0] < now - WINDOW_NS:
            self._ended.popleft()
        numbers = [number for _, number in self._ended]
        latencies = [both for number in numbers if (both := ledger.records.latencies_ms(number)) is not None]
        ttft, tpot = sorted(both[0] for both in latencies), sorted(both[1] for both in latencies if both[1] is not None)
        lost = sum(ledger.records.outcome[number] != "completed" for number in numbers)
        done = formatting.count(ledger.ended) + ("" if self.whole is None else f" of {formatting.count(self.whole)}")
        open_now = formatting.count(len(ledger.records) - ledger.ended)
        passed = max(min(now, WINDOW_NS), 1)
        last = (
            f"last {formatting.duration(passed)}: {formatting.number(len(numbers) * S / passed)}/s ended"
            f"{f', {formatting.count(lost)} without an answer' if lost else ''},"
            f" TTFT p50 {_at(ttft, 50)} p99 {_at(ttft, 99)}, TPOT p50 {_at(tpot, 50)}"
        )
        return f"{done} requests in {formatting.duration(now)}, {open_now} open", last


def _at(ordered: Sequence[float], percent: int) -> str:
    return f"{formatting.number(ordered[(len(ordered) - 1) * percent // 100])} ms" if ordered else "-"
