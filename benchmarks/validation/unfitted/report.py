"""Published measurements that no preset, factor or assumption was fitted to or chosen on: of single engines, of prefill
and decode apart, and of ratios of the two. benchmarks/validation/unfitted/rows.csv has them, with what each states.
`python benchmarks/validate.py --only unfitted` writes this section.

Each becomes the scenario that a user writes who types what the source states: presets of model and GPU, engines, load,
lengths as fixed numbers. What a source leaves out stays at pdflow's default, also where the default is known to be
wrong for it. Nothing is calibrated. Where a source does not say how many requests it sent, each client sends 10.

The aims, for rows below saturation: TPOT within 15 %, TTFT within a factor of 2, and the published order of designs. A
row is *past* saturation if, in simulation, prompts need more than 85 % of the time of the engines that compute them, or
clients wait for a slot or for KV blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from benchmarks.validation.common import Claim, Found, error, error_text, table
from benchmarks.validation.unfitted import changes, designs, experts
from benchmarks.validation.unfitted.rows import Answer, Row, digits, errors, rows, simulated
from benchmarks.validation.unfitted.sources import SOURCES

TPOT_AIM, TTFT_AIM = 0.15, 2.0


def report() -> Found:
    answers = [(row, simulated(row)) for row in rows()]
    found = Found(["### Sources", ""])
    found.lines += [
        f"- {key} ({_count(answers, key)} rows): {each.name}, {each.address}. It states {each.states}. It leaves out "
        f"{each.leaves_out}."
        for key, each in SOURCES.items()
    ]
    found.lines += [""]
    found.lines += ["### How many are within the aims", "", *_summary(answers, found)]
    found.lines += ["### Order of designs", "", str(designs.__doc__).strip(), ""]
    found.lines += designs.lines(list(designs.comparisons(answers)))
    found.lines += ["### Expert parallelism", "", str(experts.__doc__).strip(), "", *experts.lines()]
    found.lines += ["### Waves of closed loops", "", *_waves(answers)]
    found.lines += ["### Where it is wrong: experiments", "", *changes.lines(answers), changes.WRONG]
    found.lines += ["### Row by row", "", *_rows(answers)]
    return found


def _count(answers: Sequence[tuple[Row, Answer]], source: str) -> int:
    return sum(row.source == source for row, _ in answers)


def _factor(error: float) -> float:
    return max(1 + error, 1 / (1 + error))


def _summary(answers: Sequence[tuple[Row, Answer]], found: Found) -> Iterator[str]:
    lines: list[Sequence[object]] = []
    below = [(row, answer) for row, answer in answers if not answer.past]
    for key in (*SOURCES, ""):
        of_source = [(row, answer) for row, answer in answers if key in ("", row.source)]
        counted = [(row, answer) for row, answer in below if key in ("", row.source)]
        tpots, ttfts, e2es = (errors(counted, figure) for figure in ("tpot_ms", "ttft_ms", "e2e_ms"))
        lines.append(
            (
                key or "all",
                len(of_source),
                len(of_source) - len(counted),
                f"{sum(abs(each) <= TPOT_AIM for each in tpots)} of {len(tpots)}" if tpots else "–",
                error_text(tpots),
                f"{sum(_factor(each) <= TTFT_AIM for each in ttfts)} of {len(ttfts)}" if ttfts else "–",
                f"{median(map(_factor, ttfts)):.2f} ({median(ttfts):+.0%})".replace("%", " %") if ttfts else "–",
                error_text(e2es),
            )
        )
        name = f"Not fitted: {key or 'all'}"
        if tpots:
            found.summary.append(Claim(f"{name}, {len(tpots)} rows", "TPOT", error(tpots), TPOT_AIM))
        if ttfts:
            factor = median(map(_factor, ttfts))
            found.summary.append(Claim(f"{name}, {len(ttfts)} rows", "TTFT", factor - 1, TTFT_AIM - 1))
    yield from table(
        ["rows", "all", "past", "TPOT within 15 %", "TPOT error", "TTFT within 2x", "TTFT, median factor", "E2E error"],
        lines,
    )


def _waves(answers: Sequence[tuple[Row, Answer]]) -> Iterator[str]:
    yield (
        "TTFT with N clients over TTFT with one, of the same engine and lengths. If all clients send together, the "
        "last of N prompts waits for all others; if they are spread, a prompt waits for few."
    )
    yield ""
    alone = {
        (row.source, row.model, row.gpu, row.input_tokens, row.output_tokens): (row, answer)
        for row, answer in answers
        if row.clients == 1
    }
    lines = []
    for row, answer in answers:
        one = alone.get((row.source, row.model, row.gpu, row.input_tokens, row.output_tokens))
        if one is None or row.clients == 1 or answer.past:
            continue
        ratios = [
            (at.ttft_ms or 0) / (of.ttft_ms or 1)
            for at, of in ((row.published, one[0].published), (answer.figures, one[1].figures))
        ]
        lines.append((row.name, row.ttft_is, *(f"{ratio:.1f}" for ratio in ratios)))
    yield from table(["row", "TTFT is", "published", "pdflow"], lines)


def _rows(answers: Sequence[tuple[Row, Answer]]) -> Iterator[str]:
    yield "Published and simulated; *past* marks rows past saturation."
    yield ""
    for key in SOURCES:
        of_source = [(row, answer) for row, answer in answers if row.source == key]
        stated = [
            (figure, name)
            for figure, name in (
                ("ttft_ms", "TTFT ms"),
                ("tpot_ms", "TPOT ms"),
                ("e2e_ms", "E2E ms"),
                ("output_tokens_per_s", "output tokens/s"),
            )
            if any(getattr(row.published, figure) is not None for row, _ in of_source)
        ]
        yield from table(
            [key, *(name for _, name in stated)],
            [
                (
                    f"{row.name}{', *past*' if answer.past else ''}",
                    *(_cell(row, answer, figure) for figure, _ in stated),
                )
                for row, answer in of_source
            ],
        )


def _cell(row: Row, answer: Answer, figure: str) -> str:
    published, found = getattr(row.published, figure), getattr(answer.figures, figure)
    if published is None:
        return "–"
    return f"{digits(published)} → {digits(found)} ({found / published - 1:+.0%})".replace("%", " %")
