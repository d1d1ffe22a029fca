"""The style sheet of the page: system fonts, light and dark as the reader's system is, and readable on a telephone."""

from __future__ import annotations

from typing import Final

STYLE: Final = """
:root { color-scheme: light dark; --ground: #fff; --card: #f6f7f9; --text: #1b1f24; --dim: #5b6470; --rule: #d5dae0;
  --ink: #0b63b5; --wash: #b9d6f2; --bound: #b3360b; }
@media (prefers-color-scheme: dark) { :root { --ground: #14171b; --card: #1c2127; --text: #e6e9ed; --dim: #a0aab5;
  --rule: #39414b; --ink: #6db3f8; --wash: #24486b; --bound: #ff9466; } }
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
svg text { fill: var(--dim); font: 11px system-ui, sans-serif; }
svg .rule { stroke: var(--rule); fill: none; }
svg .line { stroke: var(--ink); stroke-width: 1.6; fill: none; stroke-linejoin: round; }
svg .wash { fill: var(--wash); }
svg .bound { stroke: var(--bound); stroke-dasharray: 4 3; fill: none; }
svg .label { fill: var(--bound); }
pre { padding: .8rem 1rem; background: var(--card); overflow-x: auto; font: .85rem/1.45 ui-monospace, monospace; }
@media (max-width: 30rem) { dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: .4rem; } }
@media print { body { max-width: none; } }
"""
