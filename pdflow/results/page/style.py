"""The style sheet of the page: system fonts, light and dark as the reader's system is, and readable on a telephone.

A chart in a file of its own has the same rules with the colours written out: programs that draw SVG outside of a
browser know no variables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from pdflow.results.palette import KINDS, KINDS_ON_DARK

LIGHT: Final[Mapping[str, str]] = {
    "ground": "#fff",
    "card": "#f6f7f9",
    "text": "#1b1f24",
    "dim": "#5b6470",
    "rule": "#d5dae0",
    "ink": "#0b63b5",
    "wash": "#b9d6f2",
    "bound": "#b3360b",
    **KINDS,
}
DARK: Final[Mapping[str, str]] = {
    "ground": "#14171b",
    "card": "#1c2127",
    "text": "#e6e9ed",
    "dim": "#a0aab5",
    "rule": "#39414b",
    "ink": "#6db3f8",
    "wash": "#24486b",
    "bound": "#ff9466",
    **KINDS_ON_DARK,
}
CHART_CLASS: Final = "pdflow-chart"


def _variables(colours: Mapping[str, str]) -> str:
    return " ".join(f"--{name}: {colour};" for name, colour in colours.items())


_CHARTS: Final = """
svg text { fill: var(--dim); font: 11px system-ui, sans-serif; }
svg .rule { stroke: var(--rule); fill: none; }
svg .line { stroke: var(--ink); stroke-width: 1.6; fill: none; stroke-linejoin: round; }
svg .wash { fill: var(--wash); }
svg .bound { stroke: var(--bound); stroke-dasharray: 4 3; fill: none; }
svg .label { fill: var(--bound); }
svg .halo { stroke: var(--ground); stroke-width: 3; stroke-linejoin: round; paint-order: stroke; }
svg .mark { stroke-width: 1.2; }
svg .line.aggregated { stroke: var(--aggregated); }
svg .line.disaggregated { stroke: var(--disaggregated); stroke-dasharray: 7 3; }
svg .mark.aggregated { stroke: var(--aggregated); fill: var(--aggregated); fill-opacity: .75; }
svg .mark.disaggregated { stroke: var(--disaggregated); fill: var(--disaggregated); fill-opacity: .75; }
svg .mark.neutral { stroke: var(--dim); fill: var(--dim); }
svg .mark.hollow { fill: none; stroke-opacity: .7; }
svg .ring { stroke: var(--bound); stroke-width: 2; fill: none; }
svg .filled { fill: var(--ink); }
svg .zero { stroke: var(--dim); }
svg .heat { fill: var(--ink); stroke: var(--rule); }
svg .best { stroke: var(--bound); stroke-width: 2; fill: none; }
svg .strong { fill: var(--text); }
svg .heading { font-weight: 600; }
"""

_PAGE: Final = """
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 54rem; background: var(--ground); color: var(--text);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
p { margin: .4rem 0; max-width: 72ch; overflow-wrap: anywhere; }
.dim, figcaption, dt, th { color: var(--dim); }
.verdict { margin: 1.2rem 0; padding: .8rem 1rem; background: var(--card); border-left: 4px solid var(--ink);
  font-size: 1.1rem; }
.verdict p { margin: .15rem 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; }
th, td { padding: .22rem .8rem .22rem 0; text-align: left; border-bottom: 1px solid var(--rule); }
th { font-weight: 500; vertical-align: bottom; }
td:first-child { white-space: nowrap; }
.figure { text-align: right; } td.figure { white-space: nowrap; font-variant-numeric: tabular-nums; }
th:last-child, td:last-child { padding-right: 0; }
.bar { display: block; width: 100%; min-width: 6rem; height: .8rem; background: var(--card); }
.bar i { display: block; height: 100%; min-width: 2px; background: var(--ink); }
dl { display: grid; grid-template-columns: 7.5rem 1fr; gap: .2rem .8rem; margin: 1rem 0; font-size: .95rem; }
dd { margin: 0; overflow-wrap: anywhere; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(20rem, 100%), 1fr)); gap: 1rem 1.4rem; }
figure { margin: 0; }
figcaption { font-size: .9rem; }
figcaption b { color: var(--text); font-weight: 600; }
svg { display: block; width: 100%; height: auto; }
pre { padding: .8rem 1rem; background: var(--card); overflow-x: auto; font: .85rem/1.45 ui-monospace, monospace; }
@media (max-width: 30rem) { dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: .4rem; } }
@media print { body { max-width: none; } }
"""

STYLE: Final = f"""
:root {{ color-scheme: light dark; {_variables(LIGHT)} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_variables(DARK)} }} }}{_PAGE}{_CHARTS}"""


def chart_style() -> str:
    """Return the style of a chart in a file of its own, which holds inside elements of CHART_CLASS alone."""
    rules = f"svg .ground {{ fill: var(--ground); }}{_CHARTS}".replace("svg ", f".{CHART_CLASS} ")
    return f"{_written_out(rules, LIGHT)}@media (prefers-color-scheme: dark) {{\n{_written_out(rules, DARK)}}}\n"


def _written_out(rules: str, colours: Mapping[str, str]) -> str:
    return re.sub(r"var\(--(\w+)\)", lambda found: colours[found[1]], rules)
