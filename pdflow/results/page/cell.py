"""The HTML of one run for the output of a notebook's cell: the page's first lines, and its waterfall.

A notebook's theme is not the reader's system's, so that no colour is named for text or ground: both are inherited, and
what else is drawn stands out on dark and on light. Rules hold inside the cell alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from pdflow.results.files.bench_json import statements
from pdflow.results.finished import FinishedRun
from pdflow.results.page.markup import Html, joined, table, tag
from pdflow.results.page.page import stages, title, verdict
from pdflow.results.table import LATENCY_COLUMNS

_STYLE: Final = """
.pdflow-cell { max-width: 46rem; font-size: .95em; }
.pdflow-cell h1 { font-size: 1.2em; margin: 0; } .pdflow-cell h2 { font-size: 1em; margin: 1em 0 .2em; }
.pdflow-cell p { margin: .2em 0; } .pdflow-cell .dim { opacity: .7; }
.pdflow-cell .verdict { border-left: 4px solid #3b8eea; padding-left: .7em; margin: .5em 0; }
.pdflow-cell table { border-collapse: collapse; color: inherit; }
.pdflow-cell th, .pdflow-cell td { padding: .1em 1em .1em 0; background: none; }
.pdflow-cell .word { text-align: left; } .pdflow-cell .figure { text-align: right; }
.pdflow-cell .scroll { overflow-x: auto; } .pdflow-cell td, .pdflow-cell th { vertical-align: top; }
.pdflow-cell dl { display: grid; grid-template-columns: max-content 1fr; gap: .1em 1em; margin: .5em 0; }
.pdflow-cell dt { opacity: .7; font-weight: normal; } .pdflow-cell dd { margin: 0; }
.pdflow-cell .bar { display: block; width: 14em; height: .8em; background: #8883; }
.pdflow-cell .bar i { display: block; height: 100%; min-width: 2px; background: #3b8eea; }
"""


def cell(result: FinishedRun) -> Html:
    """Return the title, the verdict, the latencies, and the waterfall of mean TTFT."""
    latencies = table(["ms", *LATENCY_COLUMNS], result.table().latency_rows())
    costs = (tag("p", f"step times {statement}", class_="dim") for statement in statements(result.header.costs))
    return framed((title(result), verdict(result), latencies, *stages(result), *costs))


def framed(sections: Iterable[Html]) -> Html:
    """Return sections of a page as the output of a cell, with rules of their own."""
    return tag("div", tag("style", Html(_STYLE)), joined(sections), class_="pdflow-cell")
