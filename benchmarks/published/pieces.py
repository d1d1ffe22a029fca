"""Sections of what other commands measure: block sizes, slices, push against pull. Each says which command that is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.published import descriptors, slices
from benchmarks.published.common import (
    FITTED,
    HELD_OUT,
    MEASURED,
    Cell,
    Section,
    axes_of,
    percent,
    verdict,
)
from benchmarks.validation import directions
from benchmarks.validation.common import read_csv, scenario_of, table
from pdflow_sim.run import simulate


def report_block_sizes() -> Section:
    section = Section("Block size 16 against 64", image="published-block-size.png")
    section.caption = "Window and hand-over of a pull of 5,000 tokens by block size"
    section.lines += [str(descriptors.__doc__).split("\n\n", 1)[1].strip(), ""]
    sizes = (16, 32, 64, 128)
    rows: list[Sequence[object]] = []
    verdicts = []
    figure, axes = axes_of("A pull of 5,000 tokens at TP4 by block size (RFC #50913)")
    for (model, layers), colour in zip(descriptors.MODELS.items(), (HELD_OUT, "#a3be8c", "#b48ead"), strict=True):
        each_s = descriptors.fitted_s(model)
        pulls = [descriptors.pulled(model, size, per_descriptor_s=each_s) for size in sizes]
        cells = [
            Cell(f"window at {size}", descriptors.WINDOW_MS[size], pull.window_ms, size == 16)
            for size, pull in zip(sizes, pulls, strict=True)
            if size in descriptors.WINDOW_MS
        ]
        cells += [
            Cell(f"hand-over at {size}", descriptors.HAND_OVER_MS[size], pull.hand_over_ms)
            for size, pull in zip(sizes, pulls, strict=True)
            if size in descriptors.HAND_OVER_MS
        ]
        verdicts.append(f"- {model}: {verdict(cells)}")
        axes.plot(sizes, [pull.window_ms for pull in pulls], marker="o", color=colour, label=f"{model}: window")
        axes.plot(sizes, [pull.hand_over_ms for pull in pulls], marker="s", linestyle="--", color=colour)
        for size, pull in zip(sizes, pulls, strict=True):
            rows.append(
                (
                    f"{model}, {each_s * 1e6:.2f} us each, block {size}{' *' if size == 16 else ''}",
                    f"{descriptors.descriptors(layers, size):,}",
                    f"{pull.window_ms:.0f}",
                    f"{descriptors.WINDOW_MS.get(size, '–')}",
                    f"{pull.hand_over_ms:.0f}",
                    f"{descriptors.HAND_OVER_MS.get(size, '–')}",
                )
            )
    for published, marker in ((descriptors.WINDOW_MS, "o"), (descriptors.HAND_OVER_MS, "s")):
        label = "published window" if marker == "o" else "published hand-over (dashed)"
        axes.scatter(list(published), list(published.values()), color=MEASURED, marker=marker, zorder=3, label=label)
    axes.set(xlabel="tokens in a block", ylabel="ms", xticks=sizes, ylim=(0, None))
    axes.legend(frameon=False, fontsize=8)
    section.figure = figure
    head = ["model (* fitted)", "descriptors", "window ms", "published", "hand-over ms", "published"]
    section.lines += table(head, rows)
    section.lines += [*verdicts, ""]
    return section


def report_slices() -> Section:
    section = Section("64 KB against 1 MB slices", image="published-slices.png")
    section.caption = "GB/s between two p5en by slice size, published and simulated"
    section.lines += [str(slices.__doc__).split("\n\n", 1)[1].strip(), ""]
    cells = [
        Cell(f"{method}, {size:,} KB", published, slices.rate(method, size), (method, size) in slices.FITTED)
        for method, rows in slices.PUBLISHED.items()
        for size, published in rows.items()
    ]
    section.lines += table(
        ["slices (* fitted)", "published GB/s", "simulated GB/s", "error"],
        (
            (
                f"{cell.name}{' *' if cell.fitted else ''}",
                f"{cell.published:.0f}",
                f"{cell.simulated:.0f}",
                percent(cell.error, True),
            )
            for cell in cells
        ),
    )
    section.lines += [f"- {verdict(cells)}", ""]
    figure, axes = axes_of("Mooncake's Transfer Engine over EFA, 16 x 200 Gb/s, by slice size")
    for method, colour in (("nixl-push", HELD_OUT), ("nixl-pull", FITTED)):
        sizes = list(slices.PUBLISHED[method])
        ours = [cell.simulated for cell in cells if cell.name.startswith(method)]
        what = "write" if method == "nixl-push" else "read"
        axes.plot(sizes, ours, color=colour, label=f"{what}, simulated")
        axes.scatter(sizes, list(slices.PUBLISHED[method].values()), color=colour, zorder=3, label=f"{what}, published")
    axes.set(xscale="log", xlabel="KB in a slice", ylabel="GB/s", ylim=(0, None))
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.legend(frameon=False, fontsize=8)
    section.figure = figure
    return section


def report_push_and_pull(folder: Path) -> Section:
    section = Section("Push against pull, 1.2x to 3.0x", image="published-push-pull.png")
    section.caption = "TTFT of pull over push, published and simulated"
    rows = {row["row_id"]: row for row in read_csv(folder / directions.FILE) if row["row_id"].startswith("nixl_")}
    pairs = [(row, rows[name.replace("pull", "push")]) for name, row in rows.items() if "pull" in name]
    published = {
        f"{pull['output_len']} out, {pull['request_rate_rps']}/s": (
            float(pull["ttft_mean_ms"]) / float(push["ttft_mean_ms"]),
            float(pull["ttft_median_ms"]) / float(push["ttft_median_ms"]),
        )
        for pull, push in pairs
    }
    simulated = {}
    for dispatch in ("concurrent", "sequential"):
        for rate in (4.0, 8.0):
            pull, push = (
                simulate(scenario_of(directions.text_of(method, dispatch, rate, 128)), quiet=True).result.summary
                for method in ("nixl-pull", "nixl-push")
            )
            simulated[f"{dispatch}, {rate:g}/s"] = tuple(
                float(pull[name]) / float(push[name]) for name in ("ttft_mean_ms", "ttft_p50_ms")
            )
    section.lines += ["TTFT of pull divided by that of push; section 4 has the stages:", ""]
    section.lines += table(
        ["run", "mean", "median"],
        [
            (f"{source}, {name}", f"{mean:.2f}", f"{middle:.2f}")
            for source, found in (("published", published), ("simulated", simulated))
            for name, (mean, middle) in found.items()
        ],
    )
    gains = [mean for name, (mean, _) in simulated.items() if name.startswith("concurrent")]
    section.lines += [
        f"- With concurrent dispatch push is faster by {min(gains):.2f}x to {max(gains):.2f}x; the claim is 1.2x to "
        f"3.0x, the median of its rows {median(mean for mean, _ in published.values()):.1f}x. With a "
        "router that waits for the prefill, push has no advantage, as users found (vllm-project/router#187). The PR "
        "names neither model nor router; nothing is fitted.",
        "- The published means at 8 requests a second are past saturation (4.7 and 5.9 completed of 8); those here are "
        "not, so the larger published factors are not reproduced.",
        "",
    ]
    figure, axes = axes_of("TTFT of pull over push (PR #35264)", (7.0, 3.0))
    bars = [*published.items(), *simulated.items()]
    for index, (_, (mean, middle)) in enumerate(bars):
        colour = MEASURED if index < len(published) else HELD_OUT
        axes.bar(index - 0.2, mean, 0.38, color=colour)
        axes.bar(index + 0.2, middle, 0.38, color=colour, alpha=0.5)
    axes.axhspan(1.2, 3.0, color="#a3be8c", alpha=0.25, zorder=0)
    axes.axhline(1, color="0.5", linewidth=1)
    sources = ["published" if index < len(published) else "simulated" for index in range(len(bars))]
    labels = [f"{source}\n{name.replace(', ', chr(10))}" for source, (name, _) in zip(sources, bars, strict=True)]
    axes.set_xticks(range(len(bars)), labels, fontsize=7)
    axes.set(ylabel="times (dark mean, light median)")
    section.figure = figure
    return section
