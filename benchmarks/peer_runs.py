"""One case of traffic in pdflow and in another simulator, each run a process of its own.

It decides what both are given, and that it is the same: the requests (drawn here once, as a Mooncake trace that both
read), step times, bandwidth, engines. How aisimulate is asked is `peer_aisimulate.py`, what the rows say `peers.py`.

Dynamo's replay knows a step's cost as a profile: prefill by its new tokens, decode by its tokens of context; so COST
has no other terms. And it knows a hand-off as bytes over a bandwidth: `bare` takes from pdflow what it has besides.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from pdflow.cost.step import StepCost
from pdflow.scenario import load
from pdflow.scenario.costs.cost_file import MadeFrom, MeasuredEngine, cost_file, written
from pdflow.workload.build import requests
from pdflow.workload.request import PREFIX_BLOCK_TOKENS, Request

REFERENCE = str(Path(__file__).resolve().parents[1] / "examples/reference.toml")
KV_BYTES_PER_TOKEN = 131_072
"""Llama-3.1-8B in 16 bits."""
KV_TOKENS = 3_200_000
"""Of each engine, in both. More than is ever asked for: only the steps and the links shall make anybody wait."""
BLOCK = 16
UNLIMITED = 10**14
HUNDRED_GBIT = 12_500_000_000

COST = StepCost(
    hp=2_000_000_000,
    a1=20_000_000,
    c0=7_000_000_000,
    c2=40_000,
    provenance="2 ms + 20 us per prompt token; 7 ms + 40 ns per token of context, in round numbers",
    rel_error={"all": "not a model of a GPU"},
)
"""Only terms that a profile of Dynamo's can say: it knows a step's new tokens, or its tokens of context."""

FIXED_COST = StepCost(
    hp=22_000_000_000,
    c0=7_000_000_000,
    provenance="22 ms for a step with prompts, 7 ms for one without, in round numbers",
    rel_error={"all": "not a model of a GPU"},
)
"""One number per phase: all that aisimulate can be given."""

PDFLOW = """
import json, sys
import pdflow
result = pdflow.simulate(sys.argv[1])
records, itl = result.records, result.metrics.itl
kind = "compiled" if pdflow.version.compiled() else "interpreted"
found = {"version": f"{pdflow.version.version()} ({kind})", "completed": result.metrics.completed}
if len(sys.argv) > 2:
    ends = dict(zip(pdflow.results.records.STAGES, records.ends))
    found["itl"] = [itl.mean_ms, itl.p50_ms, itl.p90_ms, itl.p99_ms]
    found["rows"] = [[at / 1e6 for at in row[1:]] for row in zip(
        records.outcome, records.arrival_ns, ends["p_queue"], ends["prefill"], ends["d_admit"], ends["xfer_wire"],
        records.first_token_ns, records.last_token_ns) if row[0] == "completed"]
print(json.dumps(found))
"""

DYNAMO = """
import json, sys
from importlib.metadata import version
from dynamo.replay import run_trace_replay
asked, detailed = json.loads(sys.argv[1]), len(sys.argv) > 2
report = run_trace_replay(capture_per_request=detailed, **asked)
summary = report.summary
found = {"version": version("ai-dynamo"), "completed": summary["completed_requests"]}
if detailed:
    found["itl"] = [summary[name + "_itl_ms"] for name in ("mean", "median", "p90", "p99")]
    found["rows"] = [[request[name + "_ms"] for name in (
        "arrival_time", "prefill_admit", "source_held", "destination_reserved", "destination_activated",
        "first_token", "last_token")] for request in report.per_request]
print(json.dumps(found))
"""

ARRIVED, QUEUED, PREFILLED, ADMITTED, MOVED, FIRST, LAST = range(7)
"""A row's instants, in ms. A peer's MOVED is the start of D's next step; ours is the last byte."""
Floats = npt.NDArray[np.float64]


@attrs.frozen(kw_only=True)
class Case:
    """One cluster and its traffic.

    `bare`: without whatever the peers have no word for. `saturated`: not all requests need complete.
    """

    title: str
    cost: StepCost = COST
    rate_rps: float = 8.0
    requests: int
    prefills: int = 4
    decodes: int = 4
    bandwidth: int = HUNDRED_GBIT
    bare: bool = True
    saturated: bool = False


@attrs.frozen
class Peer:
    """Another simulator: the Python of its environment, and the program that runs there with what `asked` returns."""

    name: str
    python: str
    program: str
    asked: Callable[[Case, Path], str]


@attrs.frozen(eq=False)
class Run:
    """What one simulator made of a case: a row for each completed request. Without `rows`, only what it cost."""

    version: str
    completed: int
    cpu_s: float
    peak_bytes: int
    rows: Floats
    itl: Sequence[float] = ()

    @property
    def ttft(self) -> Floats:
        return self.rows[:, FIRST] - self.rows[:, ARRIVED]

    @property
    def e2e(self) -> Floats:
        return self.rows[:, LAST] - self.rows[:, ARRIVED]


def traffic(case: Case) -> list[Request]:
    """The reference's: Poisson, uniform lengths, 1,024 and 192 tokens on average, every prompt its own."""
    edits = [f"workload.requests={case.requests}", f"workload.arrival.rate_rps={case.rate_rps}"]
    reference = load(REFERENCE, overrides=edits)
    return list(requests(reference.workload, reference.seed, reference.base_dir))


def mooncake(drawn: Sequence[Request]) -> str:
    """Requests as a Mooncake trace that begins at 0; times to the nanosecond."""
    names, lines = count(), []
    for request in drawn:
        line = {
            "timestamp": (request.arrival_ns - drawn[0].arrival_ns) / 1e6,
            "input_length": request.input_tokens,
            "output_length": request.output_tokens,
            "hash_ids": list(islice(names, -(-request.input_tokens // PREFIX_BLOCK_TOKENS))),
        }
        lines.append(json.dumps(line) + "\n")
    return "".join(lines)


def offered(drawn: Sequence[Request]) -> tuple[int, float]:
    """Bytes of KV that the prompts come to, and over how many seconds they arrive."""
    return sum(r.input_tokens for r in drawn) * KV_BYTES_PER_TOKEN, (drawn[-1].arrival_ns - drawn[0].arrival_ns) / 1e9


def profile(cost: StepCost) -> dict[str, Floats]:
    """A cost as Dynamo's planner profile: its corners, between and beyond which it draws straight lines."""
    tokens, contexts = np.array([1.0, 10_001.0]), np.array([1.0, 1_000_001.0])
    decode = [[cost.decode_step_ps(1, int(context)) / 1e9] * 2 for context in contexts]
    return {
        "prefill_isl": tokens,
        "prefill_ttft_ms": np.array([cost.step_sums_ps(int(new), 0, 0, 0) / 1e9 for new in tokens]),
        "decode_active_kv_tokens": contexts,
        "decode_context_length": tokens,  # the mean of the batch, which changes nothing
        "decode_itl": np.array(decode),
    }


def scenario(case: Case) -> str:
    """A case as a scenario file beside its trace and cost file."""
    engine = 'gpu = "h100-sxm"\ncost = { model = "measured", path = "cost.json" }\n'
    engine += f"block_size = {BLOCK}\nkv_tokens = {KV_TOKENS}\nenable_prefix_caching = false\n"
    if case.bare:
        engine += "async_scheduling = false\napi_server_s = 0.0\n"
    pools = "".join(
        f'[[pool]]\nname = "{role}"\nrole = "{role}"\nreplicas = {replicas}\n{engine}'
        for role, replicas in (("prefill", case.prefills), ("decode", case.decodes))
    )
    return (
        '[workload]\ntrace = { path = "trace.jsonl", format = "mooncake" }\n'
        f'[model]\npreset = "llama-3.1-8b"\n{pools}'
        '[transfer]\nmethod = "nixl-pull"\n[router]\npolicy = "round-robin"\ndispatch = "sequential"\n'
        f'[network]\npreset = "{"ideal" if case.bare else "rdma-400g"}"\nbandwidth_bytes_per_s = {case.bandwidth}\n'
    )


def replay(case: Case, folder: Path) -> dict[str, Any]:
    """A case as the arguments of Dynamo's run_trace_replay."""
    timing = {"type": "external", "provider": "dynamo_profile", "config": {"path": str(folder / "profile.npz")}}

    def engine(role: str) -> dict[str, Any]:
        keys = {
            "backend": "vllm",
            "worker_type": role,
            "num_gpu_blocks": KV_TOKENS // BLOCK,
            "block_size": BLOCK,
            "max_num_seqs": 256,
            "max_num_batched_tokens": 8192,
            "enable_prefix_caching": False,
            "kv_transfer_bytes_per_token": KV_BYTES_PER_TOKEN,
            "kv_transfer_bandwidth": case.bandwidth / 1e9,
            "timing_model": timing,
        }
        return {"engine": keys}

    return {
        "trace_files": str(folder / "trace.jsonl"),
        "trace_block_size": PREFIX_BLOCK_TOKENS,
        "prefill_engine_args": engine("prefill"),
        "decode_engine_args": engine("decode"),
        "num_prefill_workers": case.prefills,
        "num_decode_workers": case.decodes,
        "router_mode": "round_robin",
    }


def written_to(folder: Path, case: Case) -> None:
    """The files that both read."""
    (folder / "trace.jsonl").write_text(mooncake(traffic(case)), encoding="utf-8")
    (folder / "cost.json").write_text(written(cost_file(case.cost, MeasuredEngine(), MadeFrom(source="round numbers"))))
    (folder / "scenario.toml").write_text(scenario(case), encoding="utf-8")
    np.savez(folder / "profile.npz", **profile(case.cost))  # type: ignore[arg-type]


def measured(command: Sequence[str]) -> Run:
    """A process from start to end: what it printed, the CPU time and the memory that it took."""
    with tempfile.TemporaryFile() as complaints:
        # not RUST_LOG of whoever runs this: it would fill the output
        environment = {name: value for name, value in os.environ.items() if name != "RUST_LOG"}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=complaints, env=environment)
        assert process.stdout is not None
        with process.stdout as pipe:
            output = pipe.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            complaints.seek(0)
            raise SystemExit(complaints.read().decode(errors="replace"))
    found = json.loads(output)
    rows = np.array(sorted(found.get("rows", [])), dtype=np.float64)
    cpu_s, peak_bytes = used.ru_utime + used.ru_stime, used.ru_maxrss * 1024
    return Run(found["version"], found["completed"], cpu_s, peak_bytes, rows, found.get("itl", ()))


def simulated(case: Case, peer: Peer | None, detailed: bool = True, repeat: int = 1) -> dict[str, Run]:
    """The case in each simulator; of several runs the one that took the least CPU time."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        written_to(folder, case)
        extra_args = ["rows"] if detailed else []
        # -P: what is installed is measured, which may be compiled, not the source in this folder.
        commands = {"pdflow": [sys.executable, "-P", "-c", PDFLOW, str(folder / "scenario.toml"), *extra_args]}
        if peer is not None and case.bare:
            commands[peer.name] = [peer.python, "-c", peer.program, peer.asked(case, folder), *extra_args]
        runs = {
            who: min((measured(command) for _ in range(repeat)), key=lambda run: run.cpu_s)
            for who, command in commands.items()
        }
    for who, run in runs.items():
        if run.completed < case.requests and not case.saturated:
            raise SystemExit(f"{case.title}: {who} completed {run.completed:,} of {case.requests:,} requests")
    return runs


def dynamo(python: str) -> Peer:
    """Dynamo's offline replay in the environment of that Python."""
    return Peer("Dynamo", python, DYNAMO, lambda case, folder: json.dumps(replay(case, folder)))


def usable(name: str, python: str | None, module: str) -> str | None:
    """Why that Python cannot import a peer's module; None if it can."""
    if python is None:
        return f"no --{name} was given"
    try:
        tried = subprocess.run([python, "-c", f"import {module}"], capture_output=True, encoding="utf-8")
    except OSError as cause:
        return f"{python} does not run: {cause.strerror}"
    lines = tried.stderr.strip().splitlines()
    return f"{python} has no {module}: {lines[-1] if lines else 'it failed'}" if tried.returncode else None
