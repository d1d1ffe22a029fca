"""The same traffic in pdflow and in NVIDIA Dynamo's replay: python benchmarks/peers.py --dynamo DIR/bin/python

Replay moves no bytes either: it is a simulator with a hand-off, like ours. So where both are given the same requests,
step times and bandwidth, they must say the same, request by request; where they part, one of them models what the other
leaves out. The traffic is drawn here once, as a Mooncake trace, which both read. Each run is a process of its own.

Needs an environment of Dynamo's own (HOW_TO). Without it, only pdflow's part is shown.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))  # what is installed comes first, and may be compiled
from benchmarks.peer_runs import (
    ADMITTED,
    ARRIVED,
    FIRST,
    LAST,
    MOVED,
    PREFILLED,
    QUEUED,
    UNLIMITED,
    Case,
    Floats,
    Run,
    offered,
    simulated,
    traffic,
    usable,
)

HOW_TO = """
Dynamo's replay needs no GPU, but an environment of its own (Python 3.10 or up):
    python -m venv DIR
    DIR/bin/pip install --no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1 \\
        typing-extensions==4.16.0
    python benchmarks/peers.py --dynamo DIR/bin/python
""".strip()

NOTES = """
Made equal: arrivals and lengths (one trace), 131,072 bytes of KV per token,
step times (2 ms + 20 us per prompt token; 7 ms + 40 ns per token of context; a
planner profile for Dynamo), 16-token blocks, 256 slots, 8,192 tokens a step,
round-robin, prefill first and then a read by D, no prefix cache, ample KV.
Switched off in pdflow, because replay does not model it: API server, HTTP,
control messages, handshakes, posting, polls, asynchronous scheduling.
Not equal: of prompts in one step Dynamo takes the mean length, in whole tokens,
so a batch of n may be n - 1 tokens short; its ITL percentiles come from a
sketch, 0.4 % coarse. Its profile has no term per sequence or attended position,
so neither cost has one.
""".strip()

OVERLOAD = 1.3
STAGES = {
    "queue at P": (ARRIVED, QUEUED),
    "prefill": (QUEUED, PREFILLED),
    "until D has blocks": (PREFILLED, ADMITTED),
    "transfer, first step of D": (ADMITTED, FIRST),
}

PrintLine = Callable[[str], None]


def overloaded(case: Case, load: float) -> Case:
    """The same with NICs such that the traffic, through one of them, is `load` times what it can carry."""
    nbytes, seconds = offered(traffic(case))
    return attrs.evolve(case, bandwidth=round(nbytes / seconds / load))


def spread(values: Floats) -> list[float]:
    """Mean, p50, p90, p99."""
    return [float(values.mean()), *(float(np.percentile(values, rank)) for rank in (50, 90, 99))]


def figures(case: Case, run: Run) -> dict[str, Any]:
    """The headline figures of a run, all reckoned here from its rows but ITL, which is the simulator's own word."""
    rows, drawn = run.rows, traffic(case)
    output = np.array([request.output_tokens for request in drawn])
    seconds = (rows[:, LAST].max() - rows[0, ARRIVED]) / 1e3
    return {
        "version": run.version,
        "TTFT ms": spread(run.ttft),
        "TPOT ms": spread((rows[:, LAST] - rows[:, FIRST]) / (output - 1)),
        "ITL ms": list(run.itl),
        "E2E ms": spread(run.e2e),
        "requests/s": len(rows) / seconds,
        "output tokens/s": float(output.sum()) / seconds,
        "stages ms": {name: float((rows[:, end] - rows[:, begin]).mean()) for name, (begin, end) in STAGES.items()},
    }


def apart(runs: dict[str, Run]) -> dict[str, float] | None:
    """How far TTFT is apart, request by request; None if one is missing."""
    if len(runs) < 2:
        return None
    ours, theirs = runs["pdflow"], runs["Dynamo"]
    if not np.allclose(ours.rows[:, ARRIVED], theirs.rows[:, ARRIVED], rtol=0.0, atol=1e-5):
        raise SystemExit("the two did not read the same arrivals")
    by = ours.ttft - theirs.ttft
    return {
        "same": float((np.abs(by) < 1e-5).mean()),
        "over_1_ms": float((np.abs(by) > 1.0).mean()),
        "most_ms": float(np.abs(by).max()),
        "mean_ms": float(by.mean()),
        "e2e_most_ms": float(np.abs(ours.e2e - theirs.e2e).max()),
    }


def tenths(values: Floats) -> list[float]:
    """Means of the first tenth, the second, ... in order of arrival."""
    return [float(tenth.mean()) for tenth in np.array_split(values, 10)]


def under_way(rows: Floats) -> list[int]:
    """How many transfers have begun and not ended when the last request of each tenth arrives."""
    instants = [tenth[-1] for tenth in np.array_split(rows[:, ARRIVED], 10)]
    return [int((rows[:, ADMITTED] <= at).sum() - (rows[:, MOVED] <= at).sum()) for at in instants]


def carried(rows: Floats, nbytes: int) -> float:
    """Bytes per second between the first transfer's begin and the last one's end."""
    return float(nbytes / (rows[:, MOVED].max() - rows[:, ADMITTED].min()) * 1e3)


def title(case: Case) -> str:
    nic = "NICs without limit" if case.bandwidth == UNLIMITED else f"NICs of {case.bandwidth / 1e9:.3g} GB/s"
    return f"{case.title}: {case.prefills}P+{case.decodes}D, {case.requests:,} at {case.rate_rps:g}/s, {nic}"


def both(case: Case, dynamo: str | None) -> tuple[dict[str, Run], dict[str, Any]]:
    """A case in each simulator: the runs and their figures."""
    runs = simulated(case, dynamo)
    found: dict[str, Any] = {who: figures(case, run) for who, run in runs.items()}
    found["apart"] = apart(runs)
    return runs, found


def at_length(case: Case, dynamo: str | None, print_line: PrintLine) -> dict[str, Any]:
    """A case in both, as figures side by side."""
    runs, found = both(case, dynamo)
    print_line(", ".join(f"{who} {run.version}" for who, run in runs.items()))
    print_line("")
    print_line(title(case))
    print_line(f"{'':20}" + "".join(f"{name:>12}" for name in ("mean", "p50", "p90", "p99")))
    for name in ("TTFT ms", "TPOT ms", "ITL ms", "E2E ms"):
        for who in runs:
            print_line(f"{name:10}{who:10}" + "".join(f"{value:12.4f}" for value in found[who][name]))
    print_line(f"{'':32}" + "".join(f"{who:>12}" for who in runs))
    for name in ("requests/s", "output tokens/s"):
        print_line(f"{name:32}" + "".join(f"{found[who][name]:12.4f}" for who in runs))
    _print_stages(runs, found, print_line)
    _print_differences(found["apart"], print_line)
    return found


def briefly(case: Case, dynamo: str | None, print_line: PrintLine) -> dict[str, Any]:
    """A case in both, in a few lines."""
    runs, found = both(case, dynamo)
    print_line(title(case))
    for who in runs:
        ttft, tpot = found[who]["TTFT ms"], found[who]["TPOT ms"]
        print_line(f"  {who:10} TTFT mean {ttft[0]:9.4f} ms, p99 {ttft[3]:9.4f}; TPOT mean {tpot[0]:7.4f} ms")
    if not case.bare:
        _print_stages(runs, found, print_line)
    _print_differences(found["apart"], print_line)
    return found


def _print_stages(runs: dict[str, Run], found: dict[str, Any], print_line: PrintLine) -> None:
    print_line("mean TTFT by stage, ms")
    for name in STAGES:
        print_line(f"  {name:30}" + "".join(f"{found[who]['stages ms'][name]:12.4f}" for who in runs))


def _print_differences(by: dict[str, float] | None, print_line: PrintLine) -> None:
    if by is not None:
        print_line(f"  TTFT the same to 10 ns: {by['same']:.1%} of requests; over 1 ms apart: {by['over_1_ms']:.1%}")
        print_line(f"  most apart: TTFT {by['most_ms']:.6f} ms, E2E {by['e2e_most_ms']:.6f} ms")


def one_nic(case: Case, dynamo: str | None, print_line: PrintLine) -> dict[str, Any]:
    """A case whose prefill engine's NIC is offered more than it carries, as it goes on."""
    runs, found = both(case, dynamo)
    nbytes, seconds = offered(traffic(case))
    found |= {"bytes": nbytes, "seconds": seconds, "capacity": case.bandwidth}
    found["least_s"] = nbytes / case.bandwidth
    print_line(title(case))
    load = nbytes / seconds / case.bandwidth
    print_line(f"offered to P's NIC: {nbytes / 1e9:.1f} GB in {seconds:.1f} s, {load:.2f} times what it carries")
    for who, run in runs.items():
        moved = float(run.rows[:, MOVED].max() - run.rows[:, ADMITTED].min()) / 1e3
        found[who] |= {"tenths_ms": tenths(run.ttft), "under_way": under_way(run.rows), "moved_s": moved}
    print_line(f"{'tenth of arrivals':>18}" + "".join(f"{who + ': TTFT s':>18}{'under way':>12}" for who in runs))
    for tenth in range(10):
        cells = [f"{found[who]['tenths_ms'][tenth] / 1e3:18.3f}{found[who]['under_way'][tenth]:12}" for who in runs]
        print_line(f"{tenth + 1:18}" + "".join(cells))
    print_line(f"{'last over first':>18}" + "".join(f"{last_over_first(found[who]):18.2f}{'':12}" for who in runs))
    for who in runs:
        moved = found[who]["moved_s"]
        rate = f"{found[who]['requests/s']:.2f} requests/s"
        print_line(f"{who}: {rate}; first byte to last {moved:.1f} s, {found['least_s'] / moved:.2f} times the NIC")
    print_line(f"no NIC of that capacity carries it all in less than {found['least_s']:.1f} s")
    _print_stages(runs, found, print_line)
    return found


def last_over_first(figures: dict[str, Any]) -> float:
    """How much longer the last tenth waits than the first."""
    return float(figures["tenths_ms"][-1] / figures["tenths_ms"][0])


def speed(case: Case, sizes: Sequence[int], dynamo: str | None, repeat: int, print_line: PrintLine) -> dict[str, Any]:
    """Requests per CPU second: user and system time of whole processes, and less what one request takes."""
    found: dict[str, Any] = {}
    start = simulated(attrs.evolve(case, requests=1), dynamo, False, repeat)
    print_line(f"speed, {case.prefills}P+{case.decodes}D at {case.rate_rps:g}/s, best of {repeat}")
    print_line(f"{'':8}{'requests':>10}{'CPU s':>10}{'per CPU s':>12}{'without start':>16}{'peak MB':>10}")
    for size in sizes:
        for who, run in simulated(attrs.evolve(case, requests=size), dynamo, False, repeat).items():
            whole, alone = size / run.cpu_s, size / max(run.cpu_s - start[who].cpu_s, 1e-9)
            row = {"requests": size, "cpu_s": run.cpu_s, "per_cpu_s": whole, "without_start": alone}
            found.setdefault(who, []).append(row | {"peak_bytes": run.peak_bytes})
            print_line(f"{who:8}{size:10,}{run.cpu_s:10.3f}{whole:12,.0f}{alone:16,.0f}{run.peak_bytes / 1e6:10.0f}")
    return found


def reading(found: dict[str, Any]) -> list[str]:
    """What the figures of both say, in sentences."""
    quiet, free, shared, over = (found[name] for name in ("unsaturated", "no_link", "shared", "overload"))
    ours, theirs, default = over["pdflow"], over["Dynamo"], found["not_bare"]["pdflow"]
    same = min(quiet["apart"]["same"], free["apart"]["same"])
    most = max(quiet["apart"]["most_ms"], free["apart"]["most_ms"])
    sentences = [
        "Where no two transfers share a NIC (8/s; 100/s with unlimited NICs, where prompts queue and share steps), "
        f"TTFT is the same to 10 ns for {same:.1%} of the requests, and at most {most * 1e6:.1f} ns apart: two "
        "independent programs agree on the same model of engine and hand-off. This does not show that the model "
        "matches real engines.",
        "Where transfers overlap, in pdflow they share the NIC, and in Dynamo each has all of it. At 100/s mean TTFT "
        "is "
        f"{shared['pdflow']['TTFT ms'][0]:.2f} against {shared['Dynamo']['TTFT ms'][0]:.2f} ms; "
        f"{shared['apart']['over_1_ms']:.1%} of the requests are more than 1 ms apart, at most "
        f"{shared['apart']['most_ms']:.1f} ms.",
        f"With {OVERLOAD} times its capacity offered to one NIC, pdflow's queue grows while requests arrive: mean TTFT "
        f"of a tenth goes from {ours['tenths_ms'][0] / 1e3:.1f} s to {max(ours['tenths_ms']) / 1e3:.1f} s, and is "
        f"{ours['tenths_ms'][-1] / 1e3:.1f} s in the last, after which no requests arrive. Dynamo's stays at "
        f"{np.mean(theirs['tenths_ms']):.0f} ms: a constant. It has moved everything after {theirs['moved_s']:.1f} s, "
        f"{over['least_s'] / theirs['moved_s']:.2f} times what the NIC carries; pdflow takes {ours['moved_s']:.1f} s, "
        f"and no less than {over['least_s']:.1f} s is possible.",
        "With the parts that Dynamo's replay does not model (API servers, HTTP, handshakes, posting, polls, "
        f"asynchronous scheduling) at default values, pdflow's mean TTFT at 8/s rises from "
        f"{quiet['pdflow']['TTFT ms'][0]:.1f} to {default['TTFT ms'][0]:.1f} ms.",
    ]
    timed = found.get("speed", {"pdflow": [], "Dynamo": []})
    for mine, other in zip(timed["pdflow"], timed["Dynamo"], strict=True):
        sentences.append(
            f"Speed at {mine['requests']:,} requests: pdflow {quiet['pdflow']['version']} {mine['per_cpu_s']:,.0f} "
            f"requests per CPU second of the whole process, Dynamo {other['per_cpu_s']:,.0f}; without "
            f"start-up, {mine['without_start']:,.0f} and {other['without_start']:,.0f}."
        )
    return sentences


def everything(given: argparse.Namespace, print_line: PrintLine) -> dict[str, Any]:
    """All of it, said line by line, as figures."""
    why_not = usable(given.dynamo)
    dynamo = None if why_not else given.dynamo
    if why_not:
        print_line(f"skipped Dynamo: {why_not}\n{HOW_TO}\n")
    quiet = Case(title="unsaturated", requests=given.requests)
    busy = Case(title="busy", requests=given.requests, rate_rps=100.0)
    one = Case(title="one NIC", requests=given.requests, prefills=1)
    found: dict[str, Any] = {"skipped": why_not}
    found["unsaturated"] = at_length(quiet, dynamo, print_line)
    print_line("")
    found["no_link"] = briefly(attrs.evolve(busy, bandwidth=UNLIMITED), dynamo, print_line)
    found["shared"] = briefly(busy, dynamo, print_line)
    print_line("")
    found["overload"] = one_nic(overloaded(one, OVERLOAD), dynamo, print_line)
    print_line("")
    found["not_bare"] = briefly(attrs.evolve(quiet, title="as by default", bare=False), None, print_line)
    if given.speed:
        print_line("")
        found["speed"] = speed(quiet, given.speed, dynamo, given.repeat, print_line)
    print_line("\n" + NOTES)
    if not why_not:
        found["reading"] = reading(found)
        for sentence in found["reading"]:
            print_line("\n" + textwrap.fill(sentence, 80, initial_indent="- ", subsequent_indent="  "))
    return found


def markdown(found: dict[str, Any], lines: Sequence[str]) -> str:
    """The result as a section of a page, without its heading: what it says, then the tables."""
    items = [textwrap.fill(text, 120, initial_indent="- ", subsequent_indent="  ") for text in found["reading"]]
    tables = "\n".join(lines).split("\n\n- ")[0]
    opening = (
        "The same traffic in pdflow and in the offline replay of NVIDIA's Dynamo, written by\n"
        "`python benchmarks/peers.py --dynamo DIR/bin/python --markdown benchmarks/results/peers.md`.\n\n"
    )
    return opening + "\n".join(items) + f"\n\n```text\n{tables}\n```\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, epilog=HOW_TO, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dynamo", metavar="PYTHON", help="the Python of an environment with ai-dynamo")
    parser.add_argument("--requests", type=int, default=1000, help="of each comparison")
    parser.add_argument("--speed", type=int, nargs="*", default=[1000, 10_000], help="how many requests are timed")
    parser.add_argument("--repeat", type=int, default=3, help="the fastest of so many is shown")
    parser.add_argument("--json", action="store_true", help="figures as JSON instead of tables")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write tables and sentences there; needs Dynamo")
    given = parser.parse_args(arguments)
    lines: list[str] = []

    def print_line(line: str) -> None:
        lines.append(line.rstrip())
        if not given.json:
            print(lines[-1], flush=True)

    found = everything(given, print_line)
    if given.json:
        print(json.dumps(found, indent=1))
    if given.markdown and not found["skipped"]:
        given.markdown.write_text(markdown(found, lines), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
