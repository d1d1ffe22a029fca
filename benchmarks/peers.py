"""The same traffic in pdflow and in two other simulators:
python benchmarks/peers.py --dynamo DIR/bin/python --aisimulate DIR/bin/python

Dynamo's replay and aisimulate move no bytes either: they are simulators with a hand-off, like ours. So where two are
given the same requests, step times and bandwidth, they must say the same, request by request; where they part, one of
them models what the other leaves out. The traffic is drawn here once, as a Mooncake trace, which all read. Each run is
a process of its own.

Each peer needs an environment of its own (HOW_TO). Without it, only pdflow's part is shown.
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
from benchmarks.peer_aisimulate import aisimulate
from benchmarks.peer_figures import (
    STAGES,
    apart,
    delivered,
    figures,
    last_over_first,
    overloaded,
    tenths,
    title,
    under_way,
)
from benchmarks.peer_own_times import in_words, own_times, table
from benchmarks.peer_runs import (
    ADMITTED,
    FIXED_COST,
    MOVED,
    UNLIMITED,
    Case,
    Peer,
    Run,
    dynamo,
    offered,
    simulated,
    traffic,
    usable,
)

HOW_TO = {
    "Dynamo": """
Dynamo's replay needs no GPU, but an environment of its own (Python 3.10 or up):
    python -m venv DIR
    DIR/bin/pip install --no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1 \\
        typing-extensions==4.16.0
    python benchmarks/peers.py --dynamo DIR/bin/python
""".strip(),
    "aisimulate": """
aisimulate needs no GPU, but an environment of its own (Python 3.11 to 3.13, 1.5 GB):
    python -m venv DIR
    DIR/bin/pip install --only-binary :all: aisimulate==0.13.0.dev202610270000000085
    python benchmarks/peers.py --aisimulate DIR/bin/python
""".strip(),
}

DYNAMO_NOTES = """
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

AISIMULATE_NOTES = """
Made equal: as above, but for step times (22 ms with prompts, 7 ms without: of
given times aisimulate takes one number for each phase). Switched off in pdflow:
as above. Not equal: when a transfer has ended is, in aisimulate, the start of
D's next step. "completed": within all of the run; "in time": before the last
request arrives; "of NIC": KV of completed requests that is in D when the last
request arrives, as a multiple of what its NIC carries until then. Speed is with
given step times: aisimulate's own estimator of step times does not run.
""".strip()

OVERLOAD = 1.3
SHARES = (1.3, 1.05, 0.1)
"""Bandwidth of the contention table, as multiples of what its traffic needs."""
PrintLine = Callable[[str], None]


def both(case: Case, peer: Peer | None) -> tuple[dict[str, Run], dict[str, Any]]:
    """A case in each simulator: the runs and their figures."""
    runs = simulated(case, peer)
    found: dict[str, Any] = {who: figures(case, run) for who, run in runs.items()}
    found["apart"] = apart(runs)
    return runs, found


def at_length(case: Case, peer: Peer | None, print_line: PrintLine) -> dict[str, Any]:
    """A case in both, as figures side by side."""
    runs, found = both(case, peer)
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


def briefly(case: Case, peer: Peer | None, print_line: PrintLine) -> dict[str, Any]:
    """A case in both, in a few lines."""
    runs, found = both(case, peer)
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


def one_nic(case: Case, peer: Peer | None, print_line: PrintLine) -> dict[str, Any]:
    """A case whose prefill engine's NIC is offered more than it carries, as it goes on."""
    runs, found = both(case, peer)
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


def speed(case: Case, sizes: Sequence[int], peer: Peer | None, repeat: int, print_line: PrintLine) -> dict[str, Any]:
    """Requests per CPU second: user and system time of whole processes, and less what one request takes."""
    found: dict[str, Any] = {}
    start = simulated(attrs.evolve(case, requests=1), peer, False, repeat)
    print_line(f"speed, {case.prefills}P+{case.decodes}D at {case.rate_rps:g}/s, best of {repeat}")
    print_line(f"{'':10}{'requests':>10}{'CPU s':>10}{'per CPU s':>12}{'without start':>16}{'peak MB':>10}")
    for size in sizes:
        for who, run in simulated(attrs.evolve(case, requests=size), peer, False, repeat).items():
            whole, alone = size / run.cpu_s, size / max(run.cpu_s - start[who].cpu_s, 1e-9)
            row = {"requests": size, "cpu_s": run.cpu_s, "per_cpu_s": whole, "without_start": alone}
            found.setdefault(who, []).append(row | {"peak_bytes": run.peak_bytes})
            print_line(f"{who:10}{size:10,}{run.cpu_s:10.3f}{whole:12,.0f}{alone:16,.0f}{run.peak_bytes / 1e6:10.0f}")
    return found


def contention(case: Case, peer: Peer | None, print_line: PrintLine) -> dict[str, Any]:
    """A case at ever less of the bandwidth that its traffic needs into its one decode engine."""
    nbytes, seconds = offered(traffic(case))
    rows: list[dict[str, Any]] = []
    print_line(f"one decode engine: {case.prefills}P+{case.decodes}D, {case.requests:,} at {case.rate_rps:g}/s")
    print_line(f"offered to D's NIC: {nbytes / 1e9:.1f} GB in {seconds:.1f} s, {nbytes / seconds / 1e9:.3f} GB/s")
    columns = f"{'completed':>10}{'in time':>9}{'requests/s':>12}{'TTFT mean ms':>14}{'p99':>11}{'of NIC':>8}"
    print_line(f"{'NIC, GB/s':>9}{'of need':>9}  {'':10}{columns}")
    for share in SHARES:
        at = attrs.evolve(case, bandwidth=round(nbytes / seconds * share), saturated=True)
        row = {who: delivered(at, run) for who, run in simulated(at, peer).items()}
        for who, had in row.items():
            mean, _, _, p99 = had["TTFT ms"] or [float("nan")] * 4
            cells = f"{had['completed']:10,}{had['in_time']:9,}{had['requests/s']:12.3f}{mean:14.1f}{p99:11.1f}"
            print_line(f"{at.bandwidth / 1e9:9.4f}{share:9g}  {who:10}{cells}{had['of_nic']:8.2f}")
        rows.append({"share": share, "bandwidth": at.bandwidth, "least_s": nbytes / at.bandwidth} | row)
    return {"requests": case.requests, "bytes": nbytes, "seconds": seconds, "rows": rows}


def dynamo_reading(found: dict[str, Any]) -> list[str]:
    """What the figures of pdflow and Dynamo say, in sentences."""
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
        "With the parts that Dynamo's replay does not model (API servers, HTTP, control messages, posting, polls, "
        f"asynchronous scheduling) at default values, pdflow's mean TTFT at 8/s rises from "
        f"{quiet['pdflow']['TTFT ms'][0]:.1f} to {default['TTFT ms'][0]:.1f} ms.",
    ]
    return sentences + speed_reading(found, "Dynamo")


def aisimulate_reading(found: dict[str, Any]) -> list[str]:
    """What the figures of pdflow and aisimulate say, in sentences."""
    quiet, free, table = (found[name] for name in ("unsaturated", "no_link", "contention"))
    same = min(quiet["apart"]["same"], free["apart"]["same"])
    most = max(quiet["apart"]["most_ms"], free["apart"]["most_ms"])
    rows = table["rows"]
    mild = "; ".join(
        f"with {row['share']} times the bandwidth that is needed, {row['pdflow']['TTFT ms'][0]:,.0f} and "
        f"{row['pdflow']['TTFT ms'][3]:,.0f} ms against {row['aisimulate']['TTFT ms'][0]:,.0f} and "
        f"{row['aisimulate']['TTFT ms'][3]:,.0f}"
        for row in rows[:-1]
    )
    least, ours, theirs = rows[-1], rows[-1]["pdflow"], rows[-1]["aisimulate"]
    sentences = [
        "Where no two transfers share a NIC (8/s; 100/s with unlimited NICs) and step times are given, TTFT is the "
        f"same to 10 ns for {same:.1%} of the requests, and at most {most * 1e6:.1f} ns apart.",
        f"Into one decode engine at 5/s, mean and p99 TTFT of pdflow against aisimulate: {mild}. In aisimulate each "
        "transfer has the whole NIC, so no queue forms.",
        f"With {least['share']} times the bandwidth that is needed, aisimulate completes {theirs['completed']:,} of "
        f"{table['requests']:,} requests at {theirs['requests/s']:.2f} a second, of "
        f"{table['requests'] / table['seconds']:.2f} offered: {theirs['of_nic']:.1f} times what the NIC carries, which "
        f"is impossible. All of the KV takes {least['least_s']:,.0f} s there, and requests arrive for "
        f"{table['seconds']:,.0f} s. pdflow completes {ours['in_time']:,} requests before the last one arrives and "
        f"{ours['completed']:,} in all, and the others fail: the design is saturated.",
    ]
    return [*sentences, in_words(found["own_times"]), *speed_reading(found, "aisimulate")]


def speed_reading(found: dict[str, Any], peer: str) -> list[str]:
    """Speeds as sentences; none if nothing was timed."""
    timed = found.get("speed", {"pdflow": [], peer: []})
    return [
        f"Speed at {mine['requests']:,} requests: pdflow {found['unsaturated']['pdflow']['version']} "
        f"{mine['per_cpu_s']:,.0f} requests per CPU second of the whole process, {peer} {other['per_cpu_s']:,.0f}; "
        f"without start-up, {mine['without_start']:,.0f} and {other['without_start']:,.0f}."
        for mine, other in zip(timed["pdflow"], timed[peer], strict=True)
    ]


def with_dynamo(given: argparse.Namespace, peer: Peer | None, print_line: PrintLine) -> dict[str, Any]:
    """pdflow and Dynamo's replay, whose step times depend on tokens."""
    quiet = Case(title="unsaturated", requests=given.requests)
    busy = Case(title="busy", requests=given.requests, rate_rps=100.0)
    one = Case(title="one NIC", requests=given.requests, prefills=1)
    found: dict[str, Any] = {"unsaturated": at_length(quiet, peer, print_line)}
    print_line("")
    found["no_link"] = briefly(attrs.evolve(busy, bandwidth=UNLIMITED), peer, print_line)
    found["shared"] = briefly(busy, peer, print_line)
    print_line("")
    found["overload"] = one_nic(overloaded(one, OVERLOAD), peer, print_line)
    print_line("")
    found["not_bare"] = briefly(attrs.evolve(quiet, title="as by default", bare=False), None, print_line)
    if given.speed:
        print_line("")
        found["speed"] = speed(quiet, given.speed, peer, given.repeat, print_line)
    print_line("\n" + DYNAMO_NOTES)
    return found


def with_aisimulate(given: argparse.Namespace, peer: Peer | None, print_line: PrintLine) -> dict[str, Any]:
    """pdflow and aisimulate, at fixed step times."""
    quiet = Case(title="unsaturated", cost=FIXED_COST, requests=given.requests)
    busy = attrs.evolve(quiet, title="busy", rate_rps=100.0, bandwidth=UNLIMITED)
    found: dict[str, Any] = {"unsaturated": at_length(quiet, peer, print_line)}
    print_line("")
    found["no_link"] = briefly(busy, peer, print_line)
    print_line("")
    into_one = attrs.evolve(quiet, title="one decode engine", rate_rps=5.0, prefills=3, decodes=1)
    found["contention"] = contention(into_one, peer, print_line)
    print_line("")
    found["own_times"] = own_times(given.requests, peer)
    print_line("\n".join(table(found["own_times"], given.requests)))
    if given.speed:
        print_line("")
        found["speed"] = speed(quiet, given.speed, peer, given.repeat, print_line)
    print_line("\n" + AISIMULATE_NOTES)
    return found


@attrs.frozen
class Comparison:
    """What it takes to compare pdflow with one peer. `module` must be in its environment."""

    name: str
    option: str
    module: str
    peer: Callable[[str], Peer]
    shown: Callable[[argparse.Namespace, Peer | None, PrintLine], dict[str, Any]]
    reading: Callable[[dict[str, Any]], list[str]]


COMPARISONS = (
    Comparison("Dynamo", "dynamo", "dynamo.replay", dynamo, with_dynamo, dynamo_reading),
    Comparison("aisimulate", "aisimulate", "aisimulate.predict", aisimulate, with_aisimulate, aisimulate_reading),
)


def compared(comparison: Comparison, given: argparse.Namespace, print_line: PrintLine) -> dict[str, Any]:
    """pdflow and one peer, said line by line, as figures; pdflow alone, and why, if the peer cannot be run."""
    python = getattr(given, comparison.option)
    why_not = usable(comparison.option, python, comparison.module)
    if why_not:
        print_line(f"skipped {comparison.name}: {why_not}\n{HOW_TO[comparison.name]}\n")
    tables: list[str] = []

    def print_table(line: str) -> None:
        tables.append(line.rstrip())
        print_line(line)

    found = comparison.shown(given, None if why_not else comparison.peer(python), print_table)
    found |= {"skipped": why_not, "tables": tables}
    if not why_not:
        found["reading"] = comparison.reading(found)
        for sentence in found["reading"]:
            print_line("\n" + textwrap.fill(sentence, 80, initial_indent="- ", subsequent_indent="  "))
    print_line("")
    return found


def markdown(found: dict[str, dict[str, Any]]) -> str:
    """The results as a section of a page, without its heading: of each peer what it says, then the tables."""
    sections = [
        "The same traffic in pdflow, in the offline replay of NVIDIA's Dynamo and in NVIDIA's aisimulate, written by\n"
        "`python benchmarks/peers.py --dynamo DIR/bin/python --aisimulate DIR/bin/python --markdown FILE`."
    ]
    for name, figures_of in found.items():
        items = [textwrap.fill(x, 120, initial_indent="- ", subsequent_indent="  ") for x in figures_of["reading"]]
        tables = "\n".join(figures_of["tables"])
        sections += [f"### {name}", "\n".join(items), f"```text\n{tables}\n```"]
    return "\n\n".join(sections) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog="\n\n".join(HOW_TO.values()), formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--dynamo", metavar="PYTHON", help="the Python of an environment with ai-dynamo")
    parser.add_argument("--aisimulate", metavar="PYTHON", help="the Python of an environment with aisimulate")
    parser.add_argument("--requests", type=int, default=1000, help="of each comparison")
    parser.add_argument("--speed", type=int, nargs="*", default=[1000, 10_000], help="how many requests are timed")
    parser.add_argument("--repeat", type=int, default=3, help="the fastest of so many is shown")
    parser.add_argument("--json", action="store_true", help="figures as JSON instead of tables")
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="write tables and sentences there; needs all peers"
    )
    given = parser.parse_args(arguments)

    def print_line(line: str) -> None:
        if not given.json:
            print(line.rstrip(), flush=True)

    found = {comparison.name: compared(comparison, given, print_line) for comparison in COMPARISONS}
    if given.json:
        print(json.dumps(found, indent=1))
    missing = [name for name, figures_of in found.items() if figures_of["skipped"]]
    if given.markdown and missing:
        parser.exit(1, f"{given.markdown} is not written: skipped {', '.join(missing)}\n")
    if given.markdown:
        given.markdown.write_text(markdown(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
