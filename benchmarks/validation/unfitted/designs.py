"""Prefill and decode apart (P, D) against engines that do both (A), and ratios of prefill to decode engines: which
design is better by the published figures, and which in pdflow. 8P1+2D4 are 8 prefill engines of TP1 and 2 decode
engines of TP4. A pair of designs counts where the published figures differ by more than 10 %.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Final

import attrs

from benchmarks.validation.common import table
from benchmarks.validation.unfitted.rows import Answer, Row, digits

SAME: Final = 1.10
"""Published figures nearer than this factor are no order."""
METRICS: Final = (
    ("ttft_ms", "TTFT ms", 1),
    ("tpot_ms", "TPOT ms", 1),
    ("e2e_ms", "E2E ms", 1),
    ("output_tokens_per_s", "output tokens/s", -1),
)
"""Attribute, name, and 1 if less is better."""
KINDS: Final = {"sglang-a10": "P/D and aggregated", "llm-d": "P/D and aggregated", "dstack-ratios": "P:D ratios"}
"""What each source compares."""


@attrs.frozen(kw_only=True)
class Comparison:
    """Designs under one load, and one metric of them: published and simulated, by design."""

    kind: str
    name: str
    metric: str
    sign: int
    published: Mapping[str, float]
    simulated: Mapping[str, float]

    @property
    def pairs(self) -> list[bool]:
        """Of each pair that counts: whether the simulated order is the published one."""
        found = []
        for one, other in combinations(self.published, 2):
            ratio = self.published[one] / self.published[other]
            if max(ratio, 1 / ratio) > SAME:
                found.append((ratio > 1) == (self.simulated[one] > self.simulated[other]))
        return found

    def ordered(self, figures: Mapping[str, float]) -> str:
        best_first = sorted(figures, key=lambda design: self.sign * figures[design])
        return ", ".join(f"{design} {digits(figures[design])}" for design in best_first)


def comparisons(answers: Sequence[tuple[Row, Answer]]) -> Iterator[Comparison]:
    """Those of the same source, the same prompts and the same load."""
    groups: dict[tuple[str, str], list[tuple[Row, Answer]]] = {}
    for row, answer in answers:
        if row.source in KINDS:
            # Answers of dstack-ratios end by themselves: the id has the length that was asked for.
            asked = row.id.split("-")[1] if row.source == "dstack-ratios" else row.output_tokens
            name = f"{row.model}, {row.gpu}, {row.input_tokens}/{asked}, {row.load_name}"
            groups.setdefault((KINDS[row.source], name), []).append((row, answer))
    for (kind, name), found in groups.items():
        for attribute, metric, sign in METRICS:
            figures = {
                _design(row): (getattr(row.published, attribute), getattr(answer.figures, attribute))
                for row, answer in found
                if getattr(row.published, attribute) is not None
            }
            if len(figures) > 1:
                yield Comparison(
                    kind=kind,
                    name=name,
                    metric=metric,
                    sign=sign,
                    published={design: figure[0] for design, figure in figures.items()},
                    simulated={design: figure[1] for design, figure in figures.items()},
                )


def _design(row: Row) -> str:
    """1P3D for 1P2+3D2, whose engines all have the same parallelism, else as the row has it; llm-d's with their
    place.
    """
    if row.source == "llm-d":
        return f"{row.pools} {row.id.removeprefix('pd-')}" if "+" in row.pools else row.pools
    return "".join(f"{replicas}{role[0].upper()}" for role, replicas, _ in row.engines())


def lines(found: Sequence[Comparison]) -> Iterator[str]:
    yield from table(
        ["designs", "metric", "published, best first", "pdflow, best first", "pairs right"],
        [
            (
                each.name,
                each.metric,
                each.ordered(each.published),
                each.ordered(each.simulated),
                f"{sum(each.pairs)} of {len(each.pairs)}" if each.pairs else "–",
            )
            for each in found
        ],
    )
    cells: list[Sequence[object]] = []
    for kind in dict.fromkeys(KINDS.values()):
        cells.append((kind, *(_right(found, kind, metric) for _, metric, _ in METRICS)))
    yield from table(["pairs in the published order", *(metric for _, metric, _ in METRICS)], cells)


def _right(found: Sequence[Comparison], kind: str, metric: str) -> str:
    pairs = [pair for each in found if (each.kind, each.metric) == (kind, metric) for pair in each.pairs]
    return f"{sum(pairs)} of {len(pairs)}" if pairs else "–"
