"""One case as a configuration of NVIDIA's aisimulate, and the program that reads its answer.

aisimulate knows a hand-off as bytes over a bandwidth, as Dynamo's replay does. It can be given step times as one number
for a step with prompts and one for a step without, so it runs only cases whose cost has no other terms (FIXED_COST).
Its `predict` is run as a user runs it; how the configuration's fields are named is its own `aisimulate.config`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.peer_runs import BLOCK, KV_BYTES_PER_TOKEN, KV_TOKENS, Case, Peer
from pdflow.workload.request import PREFIX_BLOCK_TOKENS

MODEL = "meta-llama/Meta-Llama-3.1-8B"
"""One whose configuration is in aisimulate's wheel; it downloads any other. With given step times only a name."""

AISIMULATE = """
import json, pathlib, subprocess, sys
from importlib.metadata import version
config, detailed = pathlib.Path(sys.argv[1]), len(sys.argv) > 2
command = [sys.executable, "-m", "aisimulate", "predict", "-c", str(config), "--output-dir", str(config.parent)]
command += ["--overwrite", "--format", "json"] + ["--capture-per-request"] * detailed
subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
report = json.loads((config.parent / "prediction.json").read_text())
found = {"version": version("aisimulate"), "completed": report["completed_requests"]}
if detailed:
    found["itl"] = [report[name + "_itl_ms"] for name in ("mean", "median", "p90", "p99")]
    found["rows"] = [[request[name + "_ms"] for name in (
        "arrival_time", "prefill_admit", "source_held", "destination_reserved", "destination_activated",
        "first_token", "last_token")] for request in report["per_request"]]
print(json.dumps(found))
"""


def fixed_times(case: Case) -> dict[str, Any]:
    """Step times as aisimulate takes them; ValueError if a step's time depends on its tokens."""
    cost = case.cost
    prefills = {cost.step_ps([(new, 0)], []) for new in (1, 8192)}
    decodes = {cost.step_ps([], contexts) for contexts in ([1], [8192] * 256)}
    if len(prefills) > 1 or len(decodes) > 1:
        raise ValueError(f"{case.title}: aisimulate can be given one time for each phase, not {cost.provenance}")
    return {"type": "fixed", "prefill_ms": prefills.pop() / 1e9, "decode_ms": decodes.pop() / 1e9}


def prediction(case: Case, folder: Path) -> dict[str, Any]:
    """A case as a file for `aisimulate predict`."""

    def workers(replicas: int) -> dict[str, Any]:
        return {
            "parallelism": {"replicas": replicas},
            "scheduler": {"max_batched_tokens": 8192, "max_sequences": 256},
            "kv_cache": {
                "block_size": BLOCK,
                "prefix_caching": False,
                "bytes_per_token": KV_BYTES_PER_TOKEN,
                "capacity": {"type": "fixed", "blocks": KV_TOKENS // BLOCK},
            },
            "timing": fixed_times(case),
        }

    trace = {"type": "trace", "paths": [str(folder / "trace.jsonl")], "format": "mooncake"}
    engine = {
        "mode": "disaggregated",
        "model": MODEL,
        "hardware": "h100_sxm",
        "backend": "vllm",
        "workers": {"prefill": workers(case.prefills), "decode": workers(case.decodes)},
        "kv_transfer": {
            "bytes_per_token": KV_BYTES_PER_TOKEN,
            "bandwidth_gb_per_second": case.bandwidth / 1e9,
            "timing_mode": "full_prompt",
        },
    }
    return {
        "traffic": {"source": trace | {"block_size": PREFIX_BLOCK_TOKENS}, "load": {"type": "trace_timestamps"}},
        "engine": engine,
    }


def configured(case: Case, folder: Path) -> str:
    """Writes the configuration into a folder of its own, where the answer goes too, and returns its path."""
    (folder / "aisimulate").mkdir()
    path = folder / "aisimulate" / "prediction.yaml"  # JSON is YAML
    path.write_text(json.dumps(prediction(case, folder)), encoding="utf-8")
    return str(path)


def aisimulate(python: str) -> Peer:
    """aisimulate in the environment of that Python."""
    return Peer("aisimulate", python, AISIMULATE, configured)
