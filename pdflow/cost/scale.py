"""A step cost fitted to a measured engine by three factors and no more, or slower as a whole.

The error of a roofline or a table for one engine is nearly all in how fast its linear layers are, how fast it attends,
and how much host time each step takes; more than these three cannot be told apart from a few requests.

Three factors are enough: fits of published vLLM runs gained nothing from five.
"""

from __future__ import annotations

import attrs

from pdflow.cost.step import LinearTable, LinearTime, StepCost


@attrs.frozen
class Factors:
    """Corrections of a step cost. `linear` multiplies L, `attention` the terms that grow with attended and context
    tokens; `host_ps` is added to each step (taken from it, if negative, but never more than there is)."""

    linear: float = 1.0
    attention: float = 1.0
    host_ps: int = 0

    def __str__(self) -> str:
        return f"linear x {self.linear:.3f}, attention x {self.attention:.3f}, host {self.host_ps / 1e9:+.2f} ms a step"


def scaled(cost: StepCost, by: Factors) -> StepCost:
    """Return `cost` with these factors applied."""
    curve: LinearTime | LinearTable
    experts = None if cost.experts is None else _times(cost.experts, by.linear)
    if isinstance(cost.linear, LinearTable):
        curve = _times(cost.linear, by.linear)
    else:
        curve = LinearTime(
            **{coefficient: round(ps * by.linear) for coefficient, ps in attrs.asdict(cost.linear).items()}
        )
    return attrs.evolve(
        cost,
        h0=max(0, cost.h0 + by.host_ps),
        a1=round(cost.a1 * by.attention),
        a2=round(cost.a2 * by.attention),
        c1=round(cost.c1 * by.attention),
        c2=round(cost.c2 * by.attention),
        aw=round(cost.aw * by.attention),
        cw=round(cost.cw * by.attention),
        linear=curve,
        experts=experts,
    )


def slower(cost: StepCost, factor: float) -> StepCost:
    """Return a cost of which every step takes `factor` times as long."""
    if factor == 1.0:
        return cost
    whole = scaled(cost, Factors(linear=factor, attention=factor))
    host = {name: round(getattr(cost, name) * factor) for name in ("h0", "h1", "hp", "hw", "c0")}
    return attrs.evolve(whole, **host, provenance=f"{cost.provenance}, all steps x {factor:g}")


def _times(table: LinearTable, factor: float) -> LinearTable:
    return attrs.evolve(table, ps=tuple(round(ps * factor) for ps in table.ps))
