"""Asks NVIDIA's aiconfigurator and aisimulate for clusters, as a user does: a command, and the files it writes."""

from __future__ import annotations

import csv
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import attrs

from benchmarks.planning.peer_cases import Case
from pdflow_sim.plan.designs import Design, EngineShape, PoolShape

PICKS: Final = 2
"""The clusters of each kind that are taken from a peer's list."""
TRIALS: Final = 32
TRIAL_REQUESTS: Final = 600
LOWEST_SHARE: Final = 0.4
HIGHEST_SHARE: Final = 6.0
"""The rates that aisimulate searches, in times of the case's first one."""
NIC_GB_PER_S: Final = 50.0
"""400 Gb/s, as pdflow's network of these cases has."""

AISIMULATE: Final = """
import json, pathlib, subprocess, sys, yaml
config, folder = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
command = [sys.executable, "-m", "aisimulate", "recommend", "-c", str(config), "--output-dir", str(folder)]
subprocess.run(command + ["--overwrite", "--format", "json"], stdout=subprocess.DEVNULL, check=True)
found = [yaml.safe_load(path.read_text()) for path in sorted((folder / "recommendations").glob("*.yaml"))]
print(json.dumps(found))
"""


@attrs.frozen
class Pick:
    """A recommended cluster. `claimed` has what its source says: `rate`, and `ttft_ms` and `tpot_ms` if it states them;
    `clients` is the number of concurrent requests that this is for."""

    source: str
    design: Design
    claimed: Mapping[str, float]
    clients: int | None


def aiconfigurator_picks(python: str, case: Case, folder: Path) -> list[Pick]:
    """Return the first clusters of aiconfigurator's two lists, with 16-bit KV as pdflow's tables have it."""
    asked = {
        "isl": case.input_tokens,
        "osl": case.output_tokens,
        "ttft": float(case.ttft_ms),
        "tpot": float(case.tpot_ms),
        "total_gpus": case.gpus,
    }
    engine = {
        "model_path": case.model,
        "system_name": case.system,
        "backend_name": "vllm",
        "kvcache_quant_mode": "bfloat16",
    }
    sides = {f"{side}_{key}": value for side in ("prefill", "decode") for key, value in engine.items()}
    kinds: dict[str, dict[str, Any]] = {"agg": engine, "disagg": sides}
    config = {"exps": list(kinds)} | {kind: {"serving_mode": kind, **asked, **kinds[kind]} for kind in kinds}
    path = folder / "experiments.yaml"  # JSON is YAML
    path.write_text(json.dumps(config), encoding="utf-8")
    command = [str(Path(python).with_name("aiconfigurator")), "cli", "exp", "--yaml-path", str(path)]
    subprocess.run([*command, "--save-dir", str(folder)], capture_output=True, check=True)
    picks: list[Pick] = []
    for kind in kinds:
        (table,) = folder.rglob(f"{kind}/best_config_topn.csv")
        with table.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))[:PICKS]
        picks += [aiconfigurator_pick(case, row, kind == "agg") for row in rows]
    return picks


def aiconfigurator_pick(case: Case, row: Mapping[str, str], aggregated: bool) -> Pick:
    """Return a row of aiconfigurator's table, which is of one replica, as the cluster of all GPUs."""
    replicas = case.gpus // int(row["num_total_gpus"])
    if aggregated:
        pools = (PoolShape("aggregated", EngineShape(case.gpu, int(row["tp"])), replicas),)
    else:
        pools = tuple(
            PoolShape(role, EngineShape(case.gpu, int(row[f"({key})tp"])), replicas * int(row[f"({key})workers"]))
            for role, key in (("prefill", "p"), ("decode", "d"))
        )
    design = Design(pools)
    assert design.gpus == case.gpus, row
    claimed = {
        "rate": float(row["seq/s"]) * replicas,
        "ttft_ms": float(row["ttft"]),
        "tpot_ms": float(row["tpot"]),
    }
    return Pick("aiconfigurator", design, claimed, int(row["concurrency"]) * replicas)


def aisimulate_picks(python: str, case: Case, folder: Path) -> list[Pick]:
    """Return aisimulate's first clusters of each kind; the rate that it states is the one that it simulated."""
    rates = {
        "min": case.start_rate * LOWEST_SHARE,
        "max": case.start_rate * HIGHEST_SHARE,
        "scale": "log",
    }
    config: dict[str, Any] = {
        "traffic": {
            "source": {
                "type": "synthetic",
                "input_tokens": case.input_tokens,
                "output_tokens": case.output_tokens,
            },
            "load": {"type": "poisson", "requests_per_second": {"range": rates}, "seed": 1},
            "stop": {"requests": TRIAL_REQUESTS},
        },
        "engine": {
            "model": case.model,
            "hardware": case.system,
            "backend": "vllm",
            "kvcache_quant_mode": "bfloat16",
            "context_length": 2 * (case.input_tokens + case.output_tokens),
            "workers": {"aggregated": {}, "prefill": {}, "decode": {}},
            "kv_transfer": {"bandwidth_gb_per_second": NIC_GB_PER_S},
        },
        "evaluation": {"sla": {"ttft_ms": float(case.ttft_ms), "itl_ms": float(case.tpot_ms)}},
        "optimization": {
            "target": "goodput",
            "strict_sla": True,
            "constraints": {"min_candidate_gpus": case.gpus, "max_candidate_gpus": case.gpus},
        },
        "optimizer": {"algorithm": "random", "max_trials": TRIALS, "parallelism": 1, "seed": 1},
    }
    path = folder / "recommend.yaml"  # JSON is YAML
    path.write_text(json.dumps(config), encoding="utf-8")
    command = [python, "-c", AISIMULATE, str(path), str(folder / "recommended")]
    answer = subprocess.run(command, capture_output=True, check=True, text=True)
    picks: list[Pick] = []
    for each in json.loads(answer.stdout.splitlines()[-1]):
        pick = aisimulate_pick(case, each)
        alike = [other.design for other in picks if other.design.kind == pick.design.kind]
        if len(alike) < PICKS and pick.design not in alike:
            picks.append(pick)
    return picks


def aisimulate_pick(case: Case, config: Mapping[str, Any]) -> Pick:
    """Return a configuration that aisimulate recommends as a cluster."""
    engine = config["engine"]
    pools = []
    for role in ("aggregated", "prefill", "decode"):
        worker = engine["workers"].get(role)
        if worker is not None and (role == "aggregated") == (engine["mode"] == "aggregated"):
            parallel = worker["parallelism"]
            pools.append(PoolShape(role, EngineShape(case.gpu, parallel["tensor"]), parallel["replicas"]))
    design = Design(tuple(pools))
    assert design.gpus == case.gpus, engine
    rate = config["traffic"]["load"]["requests_per_second"]
    return Pick("aisimulate", design, {"rate": rate}, None)
