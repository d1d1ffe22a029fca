"""P2P NCCL (vLLM PR #18242): the order of its three methods, what groups take, and two statements about 1P3D and 3P1D.

The page says that PUT_ASYNC is fastest, then GET, then PUT, and shows tables only as pictures. It states two E2E p99
as text: about 20 s for 1,000 tokens in and 1,000 out, about 4 s for 200 out (a later version of the page says 2 s).
The runs are Llama-3.1-8B on A800, 1,000 prompts, 3 per second, burstiness 100. The page does not say which engines
those p99 are of (the pictures are of 1P5D and 1P6D; the commands, of 1P3D and 3P1D). Nothing here is fitted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.published.common import HELD_OUT, MEASURED, Section, axes_of, percent, run
from benchmarks.validation.common import table
from pdflow.methods.nccl.groups import all_groups, bytes_per_gpu, group_bytes, most_peers, pair_groups
from pdflow.results.result import Result

METHODS = ("p2p-nccl-put-async", "p2p-nccl-get", "p2p-nccl-put")
"""From the fastest, as the page says."""
RATES_RPS = (3.0, 9.0, 12.0, 15.0, 18.0)
GPU, DEVICE_BYTES = "a800", 80 << 30
P99_S = {1000: 20.0, 200: 4.0}
"""By tokens out."""


def result(method: str, rate_rps: float, p: int, d: int, output_tokens: int, requests: int = 300) -> Result:
    engine = {"gpu": GPU, "max_num_batched_tokens": 10_000, "max_num_seqs": 256, "async_scheduling": False}
    put = method != "p2p-nccl-get"
    tables: dict[str, Any] = {
        "workload": {
            "requests": requests,
            "arrival": {"process": "gamma", "rate_rps": rate_rps, "burstiness": 100.0},
            "input_tokens": 1000,
            "output_tokens": output_tokens,
        },
        "model": {"preset": "llama-3.1-8b"},
        "pool": [
            {"name": "p", "role": "prefill", "replicas": p, **engine, "gpu_memory_utilization": 0.9 if put else 0.8},
            {"name": "d", "role": "decode", "replicas": d, **engine, "gpu_memory_utilization": 0.7},
        ],
        "transfer": {"method": method, "dialect": "as-published", "kv_buffer_size": 8_000_000_000},
        "network": {"preset": "pcie4"},
    }
    return run(tables)


def report_order() -> Section:
    section = Section("PUT_ASYNC, GET, PUT", image="published-p2p-nccl-order.png")
    section.caption = "Mean TTFT of the three methods by rate"
    figures = {
        method: [float(result(method, rate, 1, 3, 20).summary["ttft_mean_ms"]) for rate in RATES_RPS]
        for method in METHODS
    }
    section.lines += ["Mean TTFT in ms, 1P3D, 1,000 tokens in, 20 out, `as-published`:", ""]
    section.lines += table(
        ["requests/s", *(method.removeprefix("p2p-nccl-").upper().replace("-", "_") for method in METHODS), "order"],
        (
            (f"{rate:g}", *(f"{figures[method][i]:.1f}" for method in METHODS), _order(figures, i))
            for i, rate in enumerate(RATES_RPS)
        ),
    )
    section.lines += [*_why(figures), ""]
    figure, axes = axes_of("P2P NCCL, 1P3D on A800: mean TTFT")
    for method, colour in zip(METHODS, (HELD_OUT, "#d08770", MEASURED), strict=True):
        axes.plot(RATES_RPS, figures[method], marker="o", color=colour, label=method)
    axes.set(xlabel="requests per second", ylabel="mean TTFT in ms", yscale="log")
    axes.legend(frameon=False, fontsize=8)
    section.figure = figure
    return section


def _order(figures: dict[str, list[float]], index: int) -> str:
    ours = [figures[method][index] for method in METHODS]
    return "as published" if ours == sorted(ours) else "**different**"


def _why(figures: dict[str, list[float]]) -> Iterator[str]:
    right = sum(_order(figures, index) == "as published" for index in range(len(RATES_RPS)))
    yield (
        f"- The published order holds at {right} of {len(RATES_RPS)} rates: those near or above P's capacity. "
        "Rates from 1 per second were tried first, and raised until the order showed."
    )
    yield (
        "- PUT_ASYNC's thread sends a layer while the next are computed, PUT sends them all when the prompt is "
        "computed, while P's engine waits; this shows where P is near its capacity. With GET, D asks after P's answer "
        "has arrived, with another hop of HTTP and API server, while P continues; at low rates that costs more than "
        "PUT's wait."
    )


def report_groups() -> Section:
    section = Section("NCCL groups", image="published-nccl-groups.png")
    section.caption = "GPU memory that groups take, by engines on the other side"
    section.lines += [
        "The page: about 100 MB for a group with 16 channels, 52 MB with 8 (`nccl_num_channels`). pdflow uses "
        f"{group_bytes(16) / 1e6:.0f} and {group_bytes(8) / 1e6:.0f} MB, on the line through both. 1P2D at TP 2 has 7 "
        f"groups on the page, and {all_groups(1, 2, 2)} here.",
        "",
    ]
    shapes = ((1, 2, 2), (1, 3, 1), (3, 1, 1), (16, 16, 8), (96, 144, 1))
    section.lines += table(
        ["P, D, TP", "groups", "P to D", "GB of a P GPU, 8 and 16 channels", "GB of a D GPU, 8 and 16 channels"],
        (
            (
                f"{p}P{d}D, TP {tp}",
                f"{all_groups(p, d, tp):,}",
                f"{pair_groups(p, d, tp):,}",
                *(", ".join(f"{bytes_per_gpu(peers, channels) / 1e9:.2f}" for channels in (8, 16)) for peers in (d, p)),
            )
            for p, d, tp in shapes
        ),
    )
    left = DEVICE_BYTES // 10
    section.lines += [
        "- Groups are created after vLLM has measured its memory, so they use the memory that `gpu_memory_utilization` "
        f"leaves free: at the 0.9 of the page's prefill engines {left / 1e9:.1f} GB of 80 GiB, enough for "
        f"{most_peers(left, 16)} peers with 16 channels and {most_peers(left, 8)} with 8. 96P144D does not fit with 16 "
        "channels: each P GPU exchanges KV with 144 peers. With "
        f"8 it takes {percent(bytes_per_gpu(144, 8) / left)} of that, and on D, with its buffer of 8 GB, "
        f"{(bytes_per_gpu(96, 8) + 8e9) / 1e9:.0f} GB must be left free. A scenario that leaves less does not load "
        "(`pdflow/methods/nccl/groups.py`). The CUDA context and the engine's own groups use the same memory "
        "and are not counted.",
        "",
    ]
    figure, axes = axes_of("NCCL groups: memory of one GPU")
    peers = list(range(0, 161, 8))
    for channels, colour in ((8, HELD_OUT), (16, "#d08770")):
        axes.plot(peers, [bytes_per_gpu(n, channels) / 1e9 for n in peers], color=colour, label=f"{channels} channels")
    axes.axhline(left / 1e9, color="0.5", linestyle="--", linewidth=1, label="a tenth of 80 GiB")
    axes.axvline(144, color="0.8", linewidth=1)
    axes.annotate("144 D of 96P144D", (144, 1), rotation=90, ha="right", fontsize=7)
    axes.set(xlabel="engines on the other side", ylabel="GB")
    axes.legend(frameon=False, fontsize=8)
    section.figure = figure
    return section


def _with_difference(seconds: float, stated: float) -> str:
    return f"{seconds:.1f} ({percent(seconds / stated - 1, True)})"


def report_topologies(requests: int = 1000) -> Section:
    section = Section("1P3D and 3P1D", image="published-p2p-nccl-topologies.png")
    section.caption = "E2E p99 of four topologies, stated and simulated"
    section.lines += ["E2E p99 in s, `p2p-nccl-put-async` as published, 3 requests a second, nothing fitted:", ""]
    topologies = ((1, 3), (3, 1), (1, 5), (1, 6))
    figures = {
        (p, d, out): float(result("p2p-nccl-put-async", 3.0, p, d, out, requests).summary["e2e_p99_ms"]) / 1e3
        for p, d in topologies
        for out in P99_S
    }
    section.lines += table(
        ["tokens in / out", "stated", *(f"{p}P{d}D" for p, d in topologies)],
        (
            (
                f"1,000 / {out:,}",
                f"about {stated:g}",
                *(_with_difference(figures[p, d, out], stated) for p, d in topologies),
            )
            for out, stated in P99_S.items()
        ),
    )
    figure, axes = axes_of("P2P NCCL, Llama-3.1-8B on A800, 3/s: E2E p99", (7.0, 3.0))
    for index, (p, d) in enumerate(topologies):
        for offset, out, colour in ((-0.2, 1000, HELD_OUT), (0.2, 200, "#d08770")):
            label = f"1,000 in, {out:,} out" if not index else None
            axes.bar(index + offset, figures[p, d, out], 0.38, color=colour, label=label)
    for stated in P99_S.values():
        axes.axhline(stated, color=MEASURED, linestyle="--", linewidth=1)
        axes.annotate(f"stated: about {stated:g} s", (-0.45, stated), ha="left", va="bottom", fontsize=7)
    axes.set_xticks(range(len(topologies)), [f"{p}P{d}D" for p, d in topologies])
    axes.set(ylabel="s", ylim=(0, 28))
    axes.legend(frameon=False, fontsize=8, loc="upper right", ncols=2)
    section.figure = figure
    return section
