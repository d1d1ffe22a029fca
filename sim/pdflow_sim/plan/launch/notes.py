"""What vLLM, and the proxy in front of it, do otherwise than a planned scenario: a sentence for each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from pdflow.scenario.presets import find_preset
from pdflow.scenario.schema.scenario import ResolvedScenario
from pdflow_sim.plan.launch.flags import VLLM_VERSION, not_served

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_CARD: Final = re.compile(rf"config\.json of ({_HUB_ID.pattern}) on Hugging Face")
_SIMULATED: Final = frozenset(("preset", "kv_dtype", "kv_bytes_per_value"))
"""Keys of [model] that are not of a checkpoint."""
_METHODS: Final = {
    "cpu-staged": "vLLM {v} has no ring in host memory. The nearest is NixlPushConnector, which copies KV through host "
    "memory block by block.",
    "p2p-nccl-put": "vLLM {v} has no P2pNcclConnector any more. The nearest is a push over NIXL.",
    "p2p-nccl-put-async": "vLLM {v} has no P2pNcclConnector any more. The nearest is a push over NIXL.",
    "p2p-nccl-get": "vLLM {v} has no P2pNcclConnector any more. The nearest is a pull over NIXL.",
    "kv-store": "vLLM {v} has a store as MooncakeStoreConnector, which needs Mooncake's master and is configured by a "
    "file of its own (MOONCAKE_CONFIG_PATH). The nearest without a store is MooncakeConnector.",
    "mooncake-v0": "vLLM {v} has no Mooncake connector with a lookup buffer. The nearest is MooncakeConnector.",
}


def model_id(scenario: ResolvedScenario, document: Mapping[str, Any]) -> str:
    """Return the id of the scenario's model on Hugging Face, "" if none is known to have its values."""
    table = document.get("model", {})
    preset = find_preset("models", str(table.get("preset", "")))
    if preset is not None:
        cards = (_CARD.search(source) for source in preset.sources.values() if source)
        card = next((found for found in cards if found), None)
        return card[1] if card is not None and not changed_values(document) else ""
    return scenario.model.name if _HUB_ID.fullmatch(scenario.model.name) and "preset" not in table else ""


def changed_values(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the values of [model] that the scenario sets in addition to a preset, and that a checkpoint must have."""
    table = document.get("model", {})
    if "preset" not in table:
        return {}
    return {key: value for key, value in table.items() if key not in _SIMULATED}


def launch_notes(scenario: ResolvedScenario, document: Mapping[str, Any]) -> Iterator[str]:
    """Yield the sentences."""
    changed = ", ".join(f"{key} = {value}" for key, value in changed_values(document).items())
    if changed:
        yield f"The plan was made for other values than the preset's: {changed}. Set MODEL to a checkpoint with them."
    elif not model_id(scenario, document):
        yield f"No Hugging Face id of the model {scenario.model.name} is known. Set MODEL to an id or a folder."
    types = {pool.gpu.name: None for pool in scenario.pools}
    if len(types) > 1:
        yield f"The engines need GPUs of {len(types)} types ({', '.join(types)}): no host has engines of two types."
    yield from _engine_notes(scenario)
    if any(pool.role != "aggregated" for pool in scenario.pools):
        yield from _transfer_notes(scenario)
    yield from _router_notes(scenario)


def _engine_notes(scenario: ResolvedScenario) -> Iterator[str]:
    for pool in scenario.pools:
        if pool.scheduling == "v0":
            yield f"Pool {pool.name} has the scheduling of vLLM V0, which vLLM {VLLM_VERSION} no longer has."
        if pool.kv_tokens is not None:
            yield (
                f"Pool {pool.name} was simulated with {pool.kv_tokens:,} tokens of KV. Compare vLLM's log line "
                '"GPU KV cache size".'
            )
    if scenario.model.kv_dtype == "int8":
        yield "KV in int8 is not set: vLLM has several such formats. Add --kv-cache-dtype to ENGINE_ARGS."


def _transfer_notes(scenario: ResolvedScenario) -> Iterator[str]:
    transfer = scenario.transfer
    if transfer.method in _METHODS:
        yield f"Method {transfer.method}: {_METHODS[transfer.method].format(v=VLLM_VERSION)}"
    reason = not_served(scenario)
    if reason:
        yield f"pdflow's connector refuses {reason}."
    if transfer.progressive:
        yield "Of the connectors only pdflow's sends layers during the prefill (progressive)."


def _router_notes(scenario: ResolvedScenario) -> Iterator[str]:
    router = scenario.router
    policies = " and ".join(dict.fromkeys(router.policies))
    if policies != "round-robin":
        yield f"The proxy takes instances in turn. The plan has {policies}."
    if any(pool.role != "aggregated" for pool in scenario.pools):
        if router.dispatch == "concurrent":
            yield "The proxy starts the decode leg after the prefill leg's answer. The plan starts both together."
        if router.disaggregate_above_tokens is not None:
            yield "The proxy sends every prompt to a prefill instance. The plan lets decode engines compute some."
    if router.attempts > 1 or router.hedge_after_s is not None:
        yield "The proxy does not retry a failed request."
    if router.max_inflight is not None or router.max_queue_tokens is not None:
        yield "The proxy has no limit on open requests."
