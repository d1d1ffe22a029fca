"""One traffic in pdflow and in aisimulate, each with its own step times: Llama-3.1-70B in 8 bits on eight H100.

Here nothing is given but model, GPU, traffic and ample KV in 16 bits. So it shows how far the step times of two
programs are apart, and whether that decides between four engines that do both and three that prefill for one that
decodes. Which is right was not measured. pdflow is run with its roofline and with its tables of NVIDIA's kernels, which
are of the same version of vLLM as aisimulate's.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.peer_figures import spread
from benchmarks.peer_runs import BLOCK, HUNDRED_GBIT, KV_TOKENS, PDFLOW, REFERENCE, Peer, Run, measured, mooncake
from pdflow.scenario import load
from pdflow.workload.build import requests
from pdflow.workload.request import PREFIX_BLOCK_TOKENS

DESIGNS = {
    "4 aggregated": {"aggregated": 4},
    "3P+1D": {"prefill": 3, "decode": 1},
}
"""Engines of each role, of two GPUs each."""
COSTS = {
    "pdflow, roofline": '{ model = "roofline" }',
    "pdflow, tables": '{ model = "aiconfigurator" }',
    "pdflow, tables, no host time": '{ model = "aiconfigurator", host_step_s = 0.0, host_seq_s = 0.0 }',
}
TRAFFIC = ("workload.input_tokens=1200", "workload.output_tokens=200", "workload.arrival.rate_rps=20.0")
TP = 2
KV_BYTES_PER_TOKEN = 327_680
"""Llama-3.1-70B in 16 bits, as in pdflow's tables. By default aisimulate takes the 8 bits of the checkpoint."""
NIC_BYTES_PER_S = 4 * HUNDRED_GBIT
"""Of each GPU."""

Found = dict[str, dict[str, dict[str, float]]]


def trace(count: int) -> str:
    """1,200 tokens in and 200 out, 20 requests per second, as a Mooncake trace."""
    drawn = load(REFERENCE, overrides=[f"workload.requests={count}", *TRAFFIC])
    return mooncake(list(requests(drawn.workload, drawn.seed, drawn.base_dir)))


def scenario(design: Mapping[str, int], cost: str) -> str:
    """A design as a scenario file next to its trace, without what aisimulate does not model."""
    pools = "".join(
        f'[[pool]]\nname = "{role}"\nrole = "{role}"\nreplicas = {replicas}\ngpu = "h100-sxm"\ntp = {TP}\n'
        f"cost = {cost}\nblock_size = {BLOCK}\nkv_tokens = {KV_TOKENS}\n"
        "max_num_seqs = 256\nmax_num_batched_tokens = 8192\n"
        "enable_prefix_caching = false\nasync_scheduling = false\napi_server_s = 0.0\n"
        for role, replicas in design.items()
    )
    return (
        '[workload]\ntrace = { path = "trace.jsonl", format = "mooncake" }\n'
        f'[model]\npreset = "llama-3.1-70b"\nweight_dtype = "fp8"\nactivation_dtype = "fp8"\n{pools}'
        '[transfer]\nmethod = "nixl-pull"\n[router]\npolicy = "round-robin"\ndispatch = "sequential"\n'
        f'[network]\npreset = "ideal"\nbandwidth_bytes_per_s = {NIC_BYTES_PER_S}\n'
    )


def prediction(design: Mapping[str, int], folder: Path) -> dict[str, Any]:
    """A design as a file for `aisimulate predict`."""
    workers = {
        role: {
            "parallelism": {"replicas": replicas, "tensor": TP},
            "scheduler": {"max_batched_tokens": 8192, "max_sequences": 256},
            "kv_cache": {
                "block_size": BLOCK,
                "prefix_caching": False,
                "bytes_per_token": KV_BYTES_PER_TOKEN,
                "capacity": {"type": "fixed", "blocks": KV_TOKENS // BLOCK},
            },
            "timing": {"kvcache_quant_mode": "bfloat16"},
        }
        for role, replicas in design.items()
    }
    engine: dict[str, Any] = {
        "mode": "aggregated" if "aggregated" in design else "disaggregated",
        "model": "nvidia/Llama-3.1-70B-Instruct-FP8",
        "hardware": "h100_sxm",
        "backend": "vllm",
        "workers": workers,
    }
    if "decode" in design:
        bandwidth = TP * NIC_BYTES_PER_S / 1e9
        engine["kv_transfer"] = {
            "bytes_per_token": KV_BYTES_PER_TOKEN,
            "bandwidth_gb_per_second": bandwidth,
            "timing_mode": "full_prompt",
        }
    source = {"type": "trace", "paths": [str(folder / "trace.jsonl")], "format": "mooncake"}
    return {
        "traffic": {"source": source | {"block_size": PREFIX_BLOCK_TOKENS}, "load": {"type": "trace_timestamps"}},
        "engine": engine,
    }


def runs(count: int, peer: Peer | None) -> Iterator[tuple[str, str, Run]]:
    """Of each design and each source of step times, what came of it."""
    for name, design in DESIGNS.items():
        with tempfile.TemporaryDirectory() as name_of_folder:
            folder = Path(name_of_folder)
            (folder / "trace.jsonl").write_text(trace(count), encoding="utf-8")
            for source, cost in COSTS.items():
                (folder / "scenario.toml").write_text(scenario(design, cost), encoding="utf-8")
                yield name, source, measured([sys.executable, "-P", "-c", PDFLOW, f"{folder}/scenario.toml", "rows"])
            if peer is not None:
                (folder / "prediction.yaml").write_text(json.dumps(prediction(design, folder)), encoding="utf-8")
                yield name, peer.name, measured([peer.python, "-c", peer.program, f"{folder}/prediction.yaml", "rows"])


def own_times(count: int, peer: Peer | None) -> Found:
    """Mean and p99 of TTFT and ITL in ms, by design and source of step times."""
    found: Found = {}
    for name, source, run in runs(count, peer):
        if run.completed < count:
            raise SystemExit(f"{name}: {source} completed {run.completed:,} of {count:,} requests")
        ttft = spread(run.ttft)
        figures = {"TTFT": ttft[0], "TTFT p99": ttft[3], "ITL": run.itl[0], "ITL p99": run.itl[3]}
        found.setdefault(name, {})[source] = figures
    return found


def table(found: Found, count: int) -> Iterator[str]:
    """The figures, line by line."""
    yield f"own step times: Llama-3.1-70B fp8, 8 H100, TP 2, {count:,} at 20/s, 1,200 tokens in, 200 out; ms"
    for name, sources in found.items():
        yield f"{name:30}" + "".join(f"{head:>10}" for head in next(iter(sources.values())))
        for source, figures in sources.items():
            yield f"  {source:28}" + "".join(f"{value:10.1f}" for value in figures.values())


def in_words(found: Found) -> str:
    """How far own step times are apart, as a sentence."""
    both, split = found.values()
    each = "; ".join(
        f"{source} {both[source]['ITL']:.1f} and {split[source]['ITL']:.1f} ms (TTFT {both[source]['TTFT']:,.0f} and "
        f"{split[source]['TTFT']:,.0f})"
        for source in both
    )
    return (
        "With each simulator's own step times, mean ITL of four aggregated engines and of 3P+1D, Llama-3.1-70B fp8 at "
        f"20/s: {each}. Which is right was not measured."
    )
