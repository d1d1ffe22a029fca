"""The twin: a live cluster, and the simulation of what `pdflow calibrate` says of it, under the same requests.

    python -m benchmarks.twin torch        one P and one D that compute, each pinned to a core, at three loads
    python -m benchmarks.twin synthetic    two P and two D that take the time that a scenario's GPUs would

A cluster is started and calibrated; then requests are sent by `pdflow bench`, and those of the same lengths are
simulated at the instants at which they came. Live stages are those that the cluster's parts note
(runtime/pdflow_runtime/observe/rows.py): from a request's arrival at the router until its first token passes there.
Printed of each stage are its share of TTFT, the medians, and the median of |simulated / live - 1| over the requests of
which it makes at least 5 % of TTFT, live or simulated; judged are stages that make at least 5 % of TTFT altogether.
`own` is that error with times that were fitted to this very run: what is left is the form of the model. `again` is that
of the live cluster against itself, to which the same requests are sent once more: no model can be expected to be nearer
to a run than another run is. `chance` is that of the simulation against itself if every other request comes half a
decode step later: which step an arrival catches, nobody can know.

What the model doesn't hold: cores that are shared with whatever else runs, here the router and the load generator, and
on a machine with other work that, too; caches and clock speeds that depend on what ran before; the collector of Python.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from math import inf
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import trio

from pdflow import simulate
from pdflow.cost.step import PS_PER_S
from pdflow.results.records import STAGES, Records, stage_durations_ns
from pdflow.scenario.costs.step_costs import step_cost
from pdflow.scenario.reading.editable import Scenario
from pdflow_runtime.bench.sender import RequestTarget
from pdflow_runtime.calibrate.command import measured_of
from pdflow_runtime.calibrate.files import write
from pdflow_runtime.calibrate.probe import Probe
from pdflow_runtime.calibrate.traffic import rate_at
from pdflow_runtime.clock import now_ns, wall_offset_ns
from pdflow_runtime.http.client import HttpClient
from pdflow_runtime.http.messages import JSON
from pdflow_runtime.observe.event_log import Page
from pdflow_runtime.observe.rows import rows
from tests.runtime.support.served import ROOT, Served, served

LOADS: Final = (0.2, 0.4, 0.6)
"""Of the busiest engine's core."""
MIN_STAGE_SHARE: Final = 0.05
STAGE_AIM: Final = 0.15
P99_AIM: Final = 0.25


class Setting(NamedTuple):
    """A cluster, by an example and what replaces values of it."""

    file: str
    overrides: tuple[str, ...]
    pinned: bool


SETTINGS: Final = {
    "torch": Setting(
        "examples/serve-quickstart.toml",
        (
            "pool.prefill.replicas=1",
            "pool.decode.replicas=1",
            "workload.input_tokens={ dist = 'uniform', low = 32, high = 768 }",
        ),
        True,
    ),
    "synthetic": Setting(
        "examples/serve-quickstart.toml",
        (
            "model.preset='llama-3.1-8b'",
            *(f"pool.{pool}.{key}" for pool in ("prefill", "decode") for key in ("engine=synthetic", "gpu='h100-sxm'")),
            "workload.input_tokens={ dist = 'uniform', low = 512, high = 8192 }",
            "workload.output_tokens={ dist = 'uniform', low = 16, high = 256 }",
        ),
        False,
    ),
}


class Row(NamedTuple):
    """A stage of one run beside another's; `error` is the median over the requests in which it counts."""

    share: float
    p50_ms: float
    other_p50_ms: float
    error: float
    counts: int


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.twin", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("which", choices=SETTINGS)
    parser.add_argument("--requests", type=int, default=150, help="at each load")
    parser.add_argument("--loads", type=float, nargs="+", default=LOADS)
    parser.add_argument("--keep", type=Path, help="a folder for what is written, to be looked at")
    parser.add_argument("--first", action="store_true", help="before whatever else runs on this machine; needs root")
    asked = parser.parse_args()
    setting = SETTINGS[asked.which]
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        with served(folder, ROOT / setting.file, *setting.overrides) as cluster:
            if asked.first:
                put_first(cluster)
            if setting.pinned:
                pin(cluster.pid_of("prefill-0"), 0)
                pin(cluster.pid_of("decode-0"), 1)
            calibrated = calibrate(cluster, setting, folder / "calibrated")
            missed = [load for load in asked.loads if not at_load(cluster, calibrated, load, asked.requests, folder)]
    print(f"\naim met at {len(asked.loads) - len(missed)} of {len(asked.loads)} loads")
    return 1 if missed else 0


def pin(pid: int, core: int) -> None:
    """All its threads, and those that these start."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), {core})


def go_first(pid: int) -> None:
    """Before whatever else runs. Linux shares cores among sessions first, and among the processes of a session then."""
    Path(f"/proc/{pid}/autogroup").write_text("-20")


def go_at_once(pid: int) -> None:
    """As if it had a core of its own: who takes little time at a time, and must not wait for those who take all."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setscheduler(int(thread.name), os.SCHED_RR, os.sched_param(1))


def put_first(cluster: Served) -> None:
    """The engines before others' work; router and load generator, which this process starts, before the engines."""
    go_at_once(os.getpid())
    for pid in processes_of(cluster.process.pid):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        (go_at_once if b"pdflow_runtime.router.front" in command else go_first)(pid)


def processes_of(pid: int) -> list[int]:
    """It, and those that it has started."""
    parents = {
        int(stat.parent.name): int(stat.read_text().rpartition(")")[2].split()[1])
        for stat in Path("/proc").glob("[0-9]*/stat")
    }
    return [pid, *(child for child, parent in parents.items() if parent == pid)]


def calibrate(cluster: Served, setting: Setting, out: Path) -> Scenario:
    url = f"http://{cluster.host}:{cluster.port}"
    set_options = [arg for override in setting.overrides for arg in ("--set", override)]
    command = ["calibrate", str(ROOT / setting.file), *set_options, "--url", url, "-o", str(out)]
    subprocess.run([sys.executable, "-m", "pdflow", *command], check=True, cwd=ROOT)
    return Scenario.load(out / "scenario.toml")


def at_load(cluster: Served, calibrated: Scenario, load: float, requests: int, folder: Path) -> bool:
    """Play it live, simulate it, compare. Whether the aim is met."""
    scenario = calibrated.resolved
    costs = {pool.name: step_cost(scenario.model, pool, scenario.base_dir) for pool in scenario.pools}
    rate = round(rate_at(scenario, costs, load), 3)
    edited = calibrated.with_(
        {
            "scenario.seed": 1000 + round(100 * load),
            "workload.requests": requests,
            "workload.arrival": {"process": "poisson", "rate_rps": rate},
        }
    )
    file = folder / f"load-{load:g}.toml"
    edited.save(file)
    pages = played(cluster, file, folder / f"live-{load:g}")
    live = rows(pages, edited.resolved).records
    again = rows(played(cluster, file, folder / f"again-{load:g}"), edited.resolved).records
    own = folder / f"own-{load:g}"
    write(own, edited, measured_of(scenario, pages, 0), "benchmarks.twin")
    same = replayed_workload(live, folder / f"live-{load:g}.csv")
    half_step = costs[scenario.pools[-1].name].decode_step_ps(1, 500) / PS_PER_S / 2
    shifted = replayed_workload(live, folder / f"shifted-{load:g}.csv", half_step)
    simulated = simulate(edited.with_({"workload": same})).records
    print(f"\nload {load:.0%}: {requests} requests, {rate:g} per second")
    return report(
        compare(live, simulated),
        compare(live, simulate(Scenario.load(own / "scenario.toml").with_({"workload": same})).records),
        compare(live, again),
        compare(simulated, simulate(edited.with_({"workload": shifted})).records),
    )


def replayed_workload(live: Records, file: Path, later_s: float = 0.0) -> dict[str, Any]:
    """A [workload] of the same requests, at the instants at which they reached the router; every other one later, but
    not behind the next."""
    arrivals_s = [arrival / 1e9 for arrival in live.arrival_ns]
    arrivals_s[1::2] = [
        min(at + later_s, after) for at, after in zip(arrivals_s[1::2], [*arrivals_s[2::2], inf], strict=False)
    ]
    rows = zip(arrivals_s, live.input_tokens, live.output_tokens, strict=True)
    lines = (f"{at:.9f},{prompt},{answer}" for at, prompt, answer in rows)
    file.write_text("\n".join(("at,prompt,answer", *lines)) + "\n")
    columns = {"arrival_s": "at", "input_tokens": "prompt", "output_tokens": "answer"}
    return {"trace": {"path": str(file), "format": "csv", "columns": columns}}


def played(cluster: Served, file: Path, out: Path) -> list[Page]:
    """What the cluster's parts note while that file's requests are sent."""
    command = ["bench", "--scenario", str(file), "--port", str(cluster.port), "--quiet", "--out", str(out)]

    async def run() -> list[Page]:
        client = HttpClient()
        probe = Probe(client, RequestTarget(cluster.host, cluster.port, "", (JSON,)), "", 0)
        since = now_ns() + wall_offset_ns()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(probe.watch)
                await trio.run_process([sys.executable, "-m", "pdflow", *command], cwd=ROOT)
                nursery.cancel_scope.cancel()
            await probe.fetch()
        finally:
            client.close()
        return [page.since(since) for page in probe.pages()]

    return trio.run(run)


def compare(one: Records, other: Records) -> dict[str, Row]:
    """By stage, TTFT behind them, and its 99th percentile as if it were one more."""
    done = np.array([a == b == "completed" for a, b in zip(one.outcome, other.outcome, strict=True)])
    stages, others = (stage_durations_ns(run)[:, done] / 1e6 for run in (one, other))
    ttft, other_ttft = stages.sum(axis=0), others.sum(axis=0)
    found = {
        stage: row_of(stages[at], others[at], ttft, other_ttft) for at, stage in enumerate(STAGES) if stages[at].any()
    }
    found["TTFT"] = row_of(ttft, other_ttft, ttft, other_ttft)
    p99, other_p99 = (float(np.quantile(whole, 0.99)) for whole in (ttft, other_ttft))
    found["p99 TTFT"] = Row(1.0, p99, other_p99, abs(other_p99 / p99 - 1), len(ttft))
    return found


def row_of(one: Any, other: Any, ttft: Any, other_ttft: Any) -> Row:
    counts = ((one >= MIN_STAGE_SHARE * ttft) | (other >= MIN_STAGE_SHARE * other_ttft)) & (one > 0)
    error = float(np.median(np.abs(other[counts] / one[counts] - 1))) if counts.any() else 0.0
    return Row(float(one.sum() / ttft.sum()), float(np.median(one)), float(np.median(other)), error, int(counts.sum()))


def report(twin: dict[str, Row], own: dict[str, Row], again: dict[str, Row], chance: dict[str, Row]) -> bool:
    """Print it; whether the aim is met."""
    heads = "".join(f"{head:>8}" for head in ("own", "again", "chance"))
    print(f"  {'':<13}{'share':>7}{'live p50':>10}{'sim p50':>9}{'error':>8}{'of':>5}{heads}")
    in_aim = True
    for name, row in twin.items():
        aim = P99_AIM if name == "p99 TTFT" else STAGE_AIM if name in STAGES and row.share >= MIN_STAGE_SHARE else None
        verdict = "" if aim is None else "ok" if row.error <= aim else "NOT MET"
        in_aim = in_aim and verdict != "NOT MET"
        others = "".join(f"{run[name].error if name in run else 0.0:>8.1%}" for run in (own, again, chance))
        print(
            f"  {name:<13}{row.share:>7.1%}{row.p50_ms:>10.2f}{row.other_p50_ms:>9.2f}{row.error:>8.1%}{row.counts:>5}"
            f"{others}  {verdict}"
        )
    return in_aim


if __name__ == "__main__":
    sys.exit(main())
