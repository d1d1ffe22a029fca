"""Which KV connector an instance loads, by one name: what `--kv-transfer-config` says for each name and role.

| name | connector |
| --- | --- |
| none | none: one vLLM alone |
| stock-push, stock-pull | vLLM's NIXL connectors without NIXL's progress thread, which would spin on our cores |
| stock-push+progress, stock-pull+progress | the same as vLLM ships them, with that thread |
| pdflow-push, pdflow-pull | pdflow's connector over NIXL |
| pdflow-push+tcp, pdflow-pull+tcp | pdflow's connector over TCP |
| pdflow-push+progressive | pdflow's over NIXL, layers leave while a prompt is computed; +tcp+progressive likewise |
"""

from __future__ import annotations

import json
from typing import Any, Final, Literal, TypeAlias

Role: TypeAlias = Literal["prefill", "decode", "alone"]

QUIET: Final = "benchmarks.vllm.quiet_nixl"
"""The module of the stock connectors without a progress thread."""
PDFLOW: Final = ("PdflowConnector", "pdflow_runtime.vllm.connector")
DIGESTING: Final = ("DigestingConnector", "benchmarks.vllm.measuring")
"""The same, which also writes digests of KV blocks, to the folder in BENCH_DIGESTS."""
TIMING: Final = ("TimingConnector", "benchmarks.vllm.measuring")
"""The same, which also counts the CPU time of its hooks, and writes it to the folder in BENCH_TIMING."""
KV_ROLES: Final = {"prefill": "kv_producer", "decode": "kv_consumer"}
NAMES: Final = (
    "none",
    *(f"stock-{mode}{thread}" for mode in ("push", "pull") for thread in ("", "+progress")),
    *(f"pdflow-{mode}{transport}" for mode in ("push", "pull") for transport in ("", "+tcp")),
    *(f"pdflow-push{transport}+progressive" for transport in ("", "+tcp")),
)

OURS: Final = tuple(name for name in NAMES if name.startswith("pdflow-"))


def origin_of(name: str) -> str:
    """Return `stock`, `pdflow` or `none`."""
    return name.partition("-")[0]


def mode_of(name: str) -> str:
    """Return `push` or `pull`."""
    return name.partition("-")[2].partition("+")[0]


def kv_transfer_config(
    name: str,
    role: Role,
    engine_id: str | None = None,
    extra: dict[str, Any] | None = None,
    pdflow: tuple[str, str] = PDFLOW,
) -> str | None:
    """Return the JSON for `--kv-transfer-config`; None where no connector is loaded. ValueError for an unknown name.

    `extra` goes into `kv_connector_extra_config`, over what the name says. Without `engine_id` vLLM draws a fresh one.
    `pdflow`: class and module of pdflow's connector.
    """
    if name not in NAMES:
        raise ValueError(f"no connector is called {name!r}; there are {', '.join(NAMES)}")
    if name == "none" or role == "alone":
        return None
    origin, mode, features = origin_of(name), mode_of(name), name.split("+")[1:]
    config: dict[str, Any] = {"kv_role": KV_ROLES[role], "kv_buffer_device": "cpu"}
    settings: dict[str, Any] = {}
    if origin == "stock":
        plain = "NixlPushConnector" if mode == "push" else "NixlConnector"
        quiet = {"kv_connector": f"Quiet{plain}", "kv_connector_module_path": QUIET}
        config |= {"kv_connector": plain} if "progress" in features else quiet
    else:
        config |= {"kv_connector": pdflow[0], "kv_connector_module_path": pdflow[1]}
        settings |= {"transfer_mode": mode, "transport": "tcp" if "tcp" in features else "nixl"}
        if "progressive" in features:
            settings["progressive"] = True
    settings |= extra or {}
    if settings:
        config["kv_connector_extra_config"] = settings
    if engine_id is not None:
        config["engine_id"] = engine_id
    return json.dumps(config)
