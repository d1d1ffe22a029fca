"""The options of `vllm serve` for the engines of a scenario. Source: `vllm serve --help=all` of vLLM 0.32.0."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal, TypeAlias

from pdflow.protocol.timers import Timers
from pdflow.protocol.values import S
from pdflow.scenario.schema.scenario import Pool, ResolvedScenario
from pdflow.scenario.schema.transfer import Transfer

VLLM_VERSION: Final = "0.32.0"
Connector: TypeAlias = Literal["pdflow", "nixl", "mooncake"]
ROLE: Final = "@ROLE@"
HOST: Final = "@HOST@"
TRANSPORT: Final = "@TRANSPORT@"
"""What the script replaces in a configuration, for each engine."""

MODULE: Final = "pdflow_runtime.vllm.connector"
_LEASE_S: Final = Timers().lease_ns / S
_PULLED: Final = ("nixl-pull", "p2p-nccl-get")


def engine_flags(pool: Pool, scenario: ResolvedScenario) -> Iterator[str]:
    """Yield the options of a pool's engines, but for addresses and the connector; each with its value."""
    yield f"--tensor-parallel-size {pool.tp}"
    if pool.pp > 1:
        yield f"--pipeline-parallel-size {pool.pp}"
    if pool.attention_replicas > 1:
        yield f"--data-parallel-size {pool.attention_replicas}"
    if pool.ep > 1:
        yield "--enable-expert-parallel"
    yield f"--max-num-seqs {pool.max_num_seqs}"
    yield f"--max-num-batched-tokens {pool.step_tokens}"
    yield f"--block-size {pool.block_size}"
    yield f"--gpu-memory-utilization {pool.gpu_memory_utilization:g}"
    yield "--enable-prefix-caching" if pool.enable_prefix_caching else "--no-enable-prefix-caching"
    yield "--async-scheduling" if pool.async_scheduling else "--no-async-scheduling"
    if scenario.model.kv_dtype == "fp8":
        yield "--kv-cache-dtype fp8"


def connectors_for(scenario: ResolvedScenario) -> tuple[Connector, ...]:
    """Return the connectors that can move KV as the scenario says, or nearly so; the first is the default."""
    if scenario.transfer.method in ("mooncake-v1", "mooncake-v0", "kv-store"):
        return "mooncake", "pdflow", "nixl"
    if scenario.transfer.method == "cpu-staged" or not_served(scenario):
        return "nixl", "pdflow"
    return "pdflow", "nixl"


def not_served(scenario: ResolvedScenario) -> str:
    """Return why pdflow's connector refuses to start with such engines; "" if it does not. docs/vllm.md has its
    limits."""
    if any(pool.pp > 1 for pool in scenario.pools):
        return "engines with pipeline stages"
    model = scenario.model
    if model.linear_attention is not None:
        return "models with linear attention"
    return "models with sparse attention" if model.sparse_attention is not None else ""


def transfer_config(connector: Connector, transfer: Transfer) -> str:
    """Return the value of --kv-transfer-config as JSON, with ROLE, HOST and TRANSPORT to be replaced."""
    pulls = transfer.method in _PULLED
    config: dict[str, Any] = {"kv_role": ROLE, "kv_load_failure_policy": "recompute"}
    if connector == "pdflow":
        config = {"kv_connector": "PdflowConnector", "kv_connector_module_path": MODULE} | config
        extra = _pdflow_extra(transfer, pulls)
    elif connector == "nixl":
        config = {"kv_connector": "NixlConnector" if pulls else "NixlPushConnector"} | config
        lease_s = transfer.kv_lease_duration_s
        extra = {"kv_lease_duration": int(lease_s)} if lease_s != _LEASE_S and lease_s >= 1 else {}
    else:
        config = {"kv_connector": "MooncakeConnector"} | config
        extra = {"num_workers": transfer.num_workers}
    if connector != "pdflow" and (transfer.kv_buffer_device == "cpu" or transfer.method == "cpu-staged"):
        config["kv_buffer_device"] = "cpu"
    if extra:
        config["kv_connector_extra_config"] = dict(extra)
    return json.dumps(config, separators=(",", ":"))


def _pdflow_extra(transfer: Transfer, pulls: bool) -> Mapping[str, Any]:
    extra: dict[str, Any] = {"transfer_mode": "pull" if pulls else "push", "transport": TRANSPORT, "host": HOST}
    if transfer.progressive and not pulls:
        extra["progressive"] = True
    defaults = Timers()
    given = {
        "lease_s": (transfer.kv_lease_duration_s, defaults.lease_ns),
        "dead_s": (transfer.dead_s, defaults.dead_ns),
        "deadline_s": (transfer.deadline_s, defaults.deadline_ns),
    }
    return extra | {key: value for key, (value, default_ns) in given.items() if value != default_ns / S}
