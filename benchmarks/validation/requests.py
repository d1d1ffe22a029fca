"""Three real vLLM runs, request by request: LLMServingSim's bench/examples (MIT).

Each run has 300 ShareGPT requests on one vLLM 0.19 instance. The scenario contains what the source states (model,
GPU, batch slots, token budget, KV capacity where it was logged), with the arrivals and lengths of the run. TTFT
counts from a request's arrival at the engine, measured relative to the first request, which was queued immediately.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import attrs

from benchmarks.validation.common import Claim, Found, error, error_text, latencies, off, scenario_of, table, world_of
from pdflow.cost.step import StepCost
from pdflow_sim.experiments.calibrate import Calibration, calibrate
from pdflow_sim.experiments.seen import MeasuredRequest

CALIBRATED_ON = tuple(range(0, 300, 30))
"""By order of arrival: chosen before any fit, and never counted in what is reported as held out."""
AFTER_A_STEP = 1.5
"""A request that was scheduled later than so many median steps after it was queued waited for a seat or for blocks."""


@attrs.frozen(kw_only=True)
class Run:
    """One run, and what its source says of the engine."""

    name: str
    file: str
    model: str
    gpu: str
    pool: str
    replicas: int = 1


PRO = Run(
    name="Llama-3.1-8B, RTX PRO 6000",
    file="RTXPRO6000_Llama-3.1-8B",
    model="llama-3.1-8b",
    gpu='"rtx-pro-6000"',
    pool="max_num_seqs = 128\nmax_num_batched_tokens = 2048",
)
RTX4090 = Run(
    name="Llama-3.1-8B, RTX 4090",
    file="RTX4090_Llama-3.1-8B",
    model="llama-3.1-8b",
    gpu='"rtx-4090"',
    pool="max_num_seqs = 256\nmax_num_batched_tokens = 2048\nkv_tokens = 41408",
)
MOE = Run(
    name="Qwen3-30B-A3B, 2 x RTX PRO 6000, DP 2 + EP",
    file="RTXPRO6000_Qwen3-30B-A3B-Instruct-2507",
    model="qwen3-30b-a3b",
    gpu='"rtx-pro-6000"',
    # Two data-parallel ranks in lockstep, each with half of the experts.
    pool="ep = 2\nmax_num_seqs = 128\nmax_num_batched_tokens = 2048",
)
RUNS = (PRO, RTX4090, MOE)


@attrs.frozen(kw_only=True)
class Measured:
    """One request: seconds since the first one's arrival, lengths, milliseconds."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    ttft_ms: float
    tpot_ms: float
    queued_ms: float


def measured(folder: Path, run: Run) -> list[Measured]:
    """A run's requests by arrival."""
    path = folder / f"llmservingsim_vllm_requests_{run.file}.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = sorted(map(json.loads, lines), key=lambda row: row["arrival_time"])
    # Wall clock and monotonic clock: the first request met an engine at rest.
    apart = rows[0]["arrival_time"] - rows[0]["queued_ts"]
    start = rows[0]["queued_ts"]
    found = []
    for row in rows:
        arrival = max(0.0, row["arrival_time"] - apart - start)
        first, last = row["first_token_ts"] - start, row["last_token_ts"] - start
        found.append(
            Measured(
                arrival_s=arrival,
                input_tokens=row["input_toks"],
                output_tokens=row["output_toks"],
                ttft_ms=(first - arrival) * 1e3,
                tpot_ms=(last - first) / (row["output_toks"] - 1) * 1e3,
                queued_ms=(row["scheduled_ts"] - row["queued_ts"]) * 1e3,
            )
        )
    return found


def text_of(run: Run, trace: Path) -> str:
    """The scenario of a run."""
    return f"""
[workload.trace]
path = "{trace}"
format = "csv"
columns = {{ arrival_s = "t", input_tokens = "i", output_tokens = "o" }}
[model]
preset = "{run.model}"
[[pool]]
name = "vllm"
role = "aggregated"
replicas = {run.replicas}
gpu = {run.gpu}
api_server_s = 0
{run.pool}
[network]
preset = "ideal"
"""


@attrs.frozen
class Outcome:
    """What came of one simulation of a run: signed errors of TTFT and of TPOT by request."""

    ttft: list[float]
    tpot: list[float]
    ttft_ms: list[float]


class Replay:
    """One run, simulated as often as it takes."""

    def __init__(self, folder: Path, run: Run, scratch: Path) -> None:
        self.run = run
        self.real = measured(folder, run)
        self.scratch = scratch
        step = median(one.tpot_ms for one in self.real)
        self.waited = [one.queued_ms > AFTER_A_STEP * step for one in self.real]
        """Who waited for a seat or for blocks: those who came when the engine was past saturation."""

    def trace(self, shift_s: float = 0.0) -> Path:
        """The run's requests as a file, every other one later by `shift_s`."""
        path = self.scratch / f"{self.run.file}_{shift_s}.csv"
        arrivals = [one.arrival_s + (shift_s if i % 2 else 0.0) for i, one in enumerate(self.real)]
        order = sorted(range(len(arrivals)), key=arrivals.__getitem__)
        rows = [f"{arrivals[i]:.9f},{self.real[i].input_tokens},{self.real[i].output_tokens}" for i in order]
        path.write_text("t,i,o\n" + "\n".join(rows) + "\n", encoding="utf-8")
        return path

    def simulated(self, run: Run | None = None, cost: StepCost | None = None) -> Outcome:
        """With another scenario, or another cost, if they are given."""
        text = text_of(run or self.run, self.trace())
        found = latencies(world_of(text, None if cost is None else {"vllm": cost}))
        return Outcome(
            off([ttft for ttft, _ in found], [one.ttft_ms for one in self.real]),
            off([tpot for _, tpot in found], [one.tpot_ms for one in self.real]),
            [ttft for ttft, _ in found],
        )

    def calibrated(self) -> Calibration:
        scenario = scenario_of(text_of(self.run, self.trace()))
        seen = [MeasuredRequest(i, self.real[i].ttft_ms, self.real[i].tpot_ms) for i in CALIBRATED_ON]
        return calibrate(scenario, scenario.pools[0], seen)


def report(folder: Path) -> Found:
    found = Found()
    with TemporaryDirectory() as scratch:
        replays = [Replay(folder, run, Path(scratch)) for run in RUNS]
        presets = [replay.simulated() for replay in replays]
        calibrations = [replay.calibrated() for replay in replays]
        fitted = [replay.simulated(cost=each.cost) for replay, each in zip(replays, calibrations, strict=True)]
        rows = []
        for replay, preset, fit in zip(replays, presets, fitted, strict=True):
            rows += list(_rows(found, replay, preset, fit))
        found.lines += table(
            ["run", "requests", "TTFT, presets", "TPOT, presets", "TTFT, calibrated", "TPOT, calibrated"], rows
        )
        for replay, calibration in zip(replays, calibrations, strict=True):
            found.lines.append(f"- {replay.run.name}: {calibration.factors}")
        found.lines += ["", *_saturation(replays, presets), "", *_effects(replays, presets)]
    return found


def _rows(found: Found, replay: Replay, preset: Outcome, fit: Outcome) -> Iterator[Sequence[object]]:
    name = replay.run.name
    for label, past in (("admitted at once", False), ("waited for a slot or blocks", True)):
        who = [i for i, waited in enumerate(replay.waited) if waited is past]
        held = [i for i in who if i not in CALIBRATED_ON]
        if len(held) < 10:
            continue
        values = [
            [errors[i] for i in which]
            for errors, which in ((preset.ttft, who), (preset.tpot, who), (fit.ttft, held), (fit.tpot, held))
        ]
        yield (f"{name}: {label}", len(who), *map(error_text, values))
        if not past:
            found.summary += [
                Claim(f"{name}, presets alone, {len(who)} requests below saturation", metric, error(errors), 0.25)
                for metric, errors in (("TTFT", values[0]), ("TPOT", values[1]))
            ]
    held = [i for i in range(len(replay.real)) if i not in CALIBRATED_ON]
    for metric, errors in (("TTFT", fit.ttft), ("TPOT", fit.tpot)):
        of_held = [errors[i] for i in held]
        found.summary.append(Claim(f"{name}, calibrated on 10, the other {len(held)}", metric, error(of_held), 0.05))


def _saturation(replays: Sequence[Replay], outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Past saturation TTFT grows through a run, below it does not: both must say the same."""
    yield from (
        "Past saturation a queue grows as long as requests arrive. Median TTFT of the first and the last 60",
        "requests, in seconds:",
        "",
    )
    rows = []
    for replay, outcome in zip(replays, outcomes, strict=True):
        real = [one.ttft_ms for one in replay.real]
        both = [(median(ttfts[:60]) / 1e3, median(ttfts[-60:]) / 1e3) for ttfts in (real, outcome.ttft_ms)]
        rows.append((replay.run.name, *(f"{first:.2f} → {last:.2f}" for first, last in both)))
    yield from table(["run", "measured", "simulated"], rows)


def _effects(replays: Sequence[Replay], outcomes: Sequence[Outcome]) -> Iterator[str]:
    """What the errors are made of: one thing changed, in a run of its own."""
    yield "Sensitivity, one change at a time from the presets (median absolute errors of all requests):"
    yield ""
    pro, rtx, moe = replays
    changes = (
        (pro, "unchanged", pro.run),
        (pro, "synchronous scheduling", _with(pro.run, "async_scheduling = false")),
        (pro, "8 batch slots fewer of 128", attrs.evolve(pro.run, pool=pro.run.pool.replace("128", "120"))),
        (rtx, "unchanged", rtx.run),
        (rtx, "KV capacity 10 % smaller", attrs.evolve(rtx.run, pool=rtx.run.pool.replace("41408", "37264"))),
        (rtx, "no host time", attrs.evolve(rtx.run, gpu=_host("rtx-4090", 0, 0))),
        (rtx, "3 ms of host time", attrs.evolve(rtx.run, gpu=_host("rtx-4090", 3e-3, 0))),
        (moe, "unchanged", moe.run),
        (moe, "synchronous scheduling", _with(moe.run, "async_scheduling = false")),
        (
            moe,
            "two engines that share no experts",
            attrs.evolve(moe.run, pool="max_num_seqs = 128\nmax_num_batched_tokens = 2048", replicas=2),
        ),
    )
    rows = []
    for replay, label, run in changes:
        outcome = outcomes[replays.index(replay)] if run == replay.run else replay.simulated(run)
        rows.append((f"{replay.run.name}: {label}", error_text(outcome.ttft), error_text(outcome.tpot)))
    yield from table(["run and change", "TTFT", "TPOT"], rows)
    yield from _chance(moe)
    yield from _cold(rtx)


def _cold(replay: Replay) -> Iterator[str]:
    """The first seconds of the run on the 4090, where prompts alone fill the steps."""
    who = [i for i, waited in enumerate(replay.waited) if not waited]
    rows = []
    for share in (0.80, 0.70, 0.60):
        run = attrs.evolve(replay.run, gpu=f'{{ preset = "rtx-4090", ec = {share} }}')
        outcome = replay.simulated(run)
        rows.append((f"{share:.2f}", error_text([outcome.ttft[i] for i in who]), error_text(outcome.ttft)))
    yield (
        f"On the RTX 4090 only the first {len(who)} requests were admitted at once, within"
        f" {replay.real[who[-1]].arrival_s:.1f} s,"
        " while steps contained only prompts. Their prompts ran more slowly than those of the rest of the run; the"
        " cause is unknown (clocks of an idle GPU, or kernels that were not compiled yet). TTFT by the assumed"
        " share of the data sheet's FLOP/s:"
    )
    yield ""
    yield from table(["share", f"the first {len(who)}", "all"], rows)


def _chance(replay: Replay) -> Iterator[str]:
    """At low load TTFT depends on which step an arrival catches: two simulations that differ in nothing else."""
    half = median(one.tpot_ms for one in replay.real) / 2e3
    plain, shifted = (latencies(world_of(text_of(replay.run, replay.trace(shift)))) for shift in (0.0, half))
    who = [i for i, waited in enumerate(replay.waited) if not waited]
    apart = error([shifted[i][0] / plain[i][0] - 1 for i in who])
    yield (
        f"The step in which a request arrives is random: if every other request of {replay.run.name} arrives half a "
        f"step ({half * 1e3:.0f} ms) later, the same simulation differs from itself by {apart:.1%} ".replace("%", " %")
        + "in median TTFT, below saturation. No simulation of single requests can be much closer to a real run."
    )
    yield ""


def _with(run: Run, line: str) -> Run:
    return attrs.evolve(run, pool=f"{run.pool}\n{line}")


def _host(gpu: str, step_s: float, seq_s: float) -> str:
    return f'{{ preset = "{gpu}", host_step_s = {step_s:f}, host_seq_s = {seq_s:f} }}'
