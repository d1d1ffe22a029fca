"""The keys that a sound scenario sets and that change nothing in it, each with the reason.

A key with its default says nothing of the method, and is not reported. Keys that only a live cluster reads (`serve`,
`engine`, `device`), or only the simulator, have an effect here: `pdflow_runtime/simulated_only.py` has the latter. The
keys of a pasted transfer configuration that have none are found in `scenario/without_effect.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeAlias

import attrs

from pdflow.methods.catalogue import METHODS
from pdflow.methods.method import Hop, MemoryKind, Method
from pdflow.methods.posting import Extent
from pdflow.protocol.dialect import Dialect
from pdflow.scenario.costs.step_costs import ApiServerTime, api_server_time
from pdflow.scenario.reading.convert import Complaint
from pdflow.scenario.reading.document import ScenarioTables
from pdflow.scenario.schema.network import Network
from pdflow.scenario.schema.noise import Noise
from pdflow.scenario.schema.scenario import Pool, RooflineCost
from pdflow.scenario.schema.transfer import Transfer

Reasons: TypeAlias = Iterator[tuple[str, str]]
"""Keys of one table without effect, whether they are set or not, and why."""


def _keeps_kv_in(*memories: MemoryKind) -> Callable[[Method], bool]:
    return lambda method: method.p_memory in memories or method.d_memory in memories


_STORE_KEYS: Final = ("nodes", "bytes", "granularity", "keep", "hidden_states", "lease_s", "high_water")
_OF_METHODS: Final[tuple[tuple[tuple[str, ...], Callable[[Method], bool], str], ...]] = (
    (("load_by_layer",), lambda method: method.loading is Hop.H2D, "does not load KV from host memory at D"),
    (("progressive",), lambda method: method.writes_blocks, "does not write from P's blocks"),
    (("host_buffer_bytes",), _keeps_kv_in(MemoryKind.RING), "has no ring in host memory"),
    (
        ("kv_buffer_size",),
        _keeps_kv_in(MemoryKind.BUFFER, MemoryKind.STORE, MemoryKind.LOOKUP),
        "has no buffer for KV in GPU memory",
    ),
    (("mem_pool_size_gb",), _keeps_kv_in(MemoryKind.BUFFER), "has no buffer that spills to host memory"),
    (("nccl_num_channels", "nccl_max_groups"), lambda method: method.groups, "has no NCCL groups"),
    (("num_workers",), lambda method: method.has_workers, "has no writer threads at P"),
    (tuple(f"store_{key}" for key in _STORE_KEYS), lambda method: method.stores, "has no store"),
)
"""Keys of [transfer], the methods that read them, and what the others lack."""

_OF_DIALECTS: Final[tuple[tuple[tuple[str, ...], Callable[[Dialect], bool], str], ...]] = (
    (
        ("sync_s", "dead_s", "cancel_first_s", "cancel_last_s"),
        lambda dialect: dialect.control_frames,
        "has neither SYNC nor CANCEL messages",
    ),
    (("join_s",), lambda dialect: not dialect.waits_for_all_ranks, "waits for the registrations of all ranks of D"),
    (("registration_ttl_s",), lambda dialect: dialect.registrations_end, "keeps registrations forever"),
    (
        ("quarantine_fraction", "quarantine_suspect_fraction", "suspect_s"),
        lambda dialect: dialect.limits_peers,
        "limits no peer's share of D's blocks",
    ),
    (
        ("backoff_first_s", "backoff_last_s"),
        lambda dialect: dialect.remembers_failures,
        "repeats a failed handshake with the next request",
    ),
)
"""Keys of [transfer], the dialects of the protocol that read them, and what the others do instead."""


def ignored_keys(document: Mapping[str, Any], tables: ScenarioTables) -> Iterator[Complaint]:
    """Yield the keys without effect that a document sets; `tables` are its own, and sound."""
    transfer, network, noise = tables.transfer, tables.network, tables.noise
    assert transfer is not None
    assert network is not None
    assert noise is not None
    pools = [pool for pool in tables.pools if pool is not None]
    # A router that weighs a transfer counts its descriptors, whatever the method.
    weighs = tables.router is not None and tables.router.disaggregate_above_tokens == "auto"
    yield from _set(document, "transfer", transfer, _of_transfer(transfer, pools, bool(tables.fault_list)))
    yield from _set(document, "transfer", transfer, _of_posting(transfer, network, weighs))
    yield from _set(document, "network", network, _of_network(transfer, network, pools, weighs))
    yield from _links(network)
    yield from _set(document, "noise", noise, _of_noise(noise, network, pools))
    for index, pool in enumerate(pools):
        if pool.kv_tokens is not None and pool.gpu_memory_utilization != _default(pool, "gpu_memory_utilization"):
            yield _complaint(("pool", index, "gpu_memory_utilization"), "kv_tokens is the pool's KV capacity")
        if pool.expert_balancedness != _default(pool, "expert_balancedness"):
            yield from _of_experts(index, pool)
        asked = document["pool"][index].get("async_scheduling")
        if asked and pool.computes_prompts_first(transfer.adapted_method().pipeline_policy(transfer.dialect)):
            why = "vLLM V0 has no asynchronous scheduling" + (
                ""
                if pool.scheduling
                else f', and {transfer.method} as published has its engines; set scheduling = "v1"'
            )
            yield _complaint(("pool", index, "async_scheduling"), why)


def _complaint(path: tuple[str | int, ...], reason: str) -> Complaint:
    return Complaint(path, f"has no effect: {reason}")


def _default(table: Any, key: str) -> Any:
    return getattr(attrs.fields(type(table)), key).default


def _set(document: Mapping[str, Any], name: str, table: Any, reasons: Reasons) -> Iterator[Complaint]:
    """Keep the keys that the document sets to another value than their default."""
    written = document.get(name, {})
    for key, reason in reasons:
        if key in written and getattr(table, key) != _default(table, key):
            yield _complaint((name, key), reason)


def _of_transfer(transfer: Transfer, pools: list[Pool], faults: bool) -> Reasons:
    method, dialect = METHODS[transfer.method], METHODS[transfer.method].dialect(transfer.dialect)
    for keys, reads, lacks in _OF_METHODS:
        if not reads(method):
            others = ", ".join(name for name, other in METHODS.items() if reads(other))
            for key in keys:
                yield key, f"{transfer.method} {lacks}; it is for {others}"
    for keys, applies, instead in _OF_DIALECTS:
        if not applies(dialect):
            for key in keys:
                yield key, f"{transfer.method} with dialect {transfer.dialect} {instead}"
    if not method.pipeline_policy(transfer.dialect).pickles:
        yield "pickle_bytes_per_s", "only mooncake-v0 as-published pickles KV"
    if not method.from_blocks_to_blocks and not any(pool.device == "cuda" for pool in pools):
        yield "kv_buffer_device", f"{transfer.method} does not move KV from blocks to blocks, and no pool is on a GPU"
    if dialect.control_frames or method.pulls:
        yield "push_registration_timeout_s", "D has a watchdog for registrations with vllm-compat pushes only"
    if dialect.control_frames and not faults:
        yield "handshake_timeout_s", "without [[fault]] every handshake succeeds"


def _of_posting(transfer: Transfer, network: Network, weighs: bool) -> Reasons:
    method = METHODS[transfer.method]
    reads = transfer.read_thread() is not None
    if not reads:
        why = "posts no READs at D" if not method.pulls else "as published lets D's next step wait for its READs anyway"
        yield "reads_on", f"{transfer.method} {why}"
    if method.staged_at_p and method.staged_at_d and not weighs:
        yield "connector", f"{transfer.method} posts whole ranges of staging memory, whatever the connector"
    elif not network.per_descriptor_s and not reads:
        yield "connector", "a descriptor costs nothing in this network (per_descriptor_s is 0)"
    if not (network.poll and method.dialect(transfer.dialect).polls_at_steps) or method.pulls:
        yield "writer_poll_s", "P has a thread that polls with vllm-compat pushes only"


def _of_network(transfer: Transfer, network: Network, pools: list[Pool], weighs: bool) -> Reasons:
    method = transfer.adapted_method()
    policy = method.pipeline_policy(transfer.dialect)
    several = network.nics_per_rank > 1 or any(pool.attention_replicas > 1 for pool in pools)
    if method.is_carried(policy):
        yield "coalesce", f"{transfer.method} posts pieces, of which none are merged"
    elif transfer.posting().extent is Extent.TRANSFER:
        yield "coalesce", "the connector posts each transfer as one descriptor"
    elif not network.per_descriptor_s:
        yield "coalesce", "a descriptor costs nothing (per_descriptor_s is 0)"
    if method.staged_at_p and method.staged_at_d and not policy.page_bytes and not weighs:
        yield "per_descriptor_s", f"{transfer.method} posts whole ranges of staging memory"
    if not network.slice_bytes:
        yield "per_slice_s", "transfers are not sliced (slice_bytes is 0)"
    elif not several and not network.per_slice_s:
        yield "slice_bytes", "there is one NIC, and a slice costs nothing (per_slice_s is 0)"
    if not method.dialect(transfer.dialect).polls_at_steps:
        yield "poll", f"{transfer.method} with dialect {transfer.dialect} does not poll"


def _links(network: Network) -> Iterator[Complaint]:
    used = {name for path in network.paths for name in path.via}
    for index, link in enumerate(network.links):
        if link.name not in used:
            yield _complaint(("network", "links", index), f"no path of network.paths crosses link {link.name}")


def _of_noise(noise: Noise, network: Network, pools: list[Pool]) -> Reasons:
    if noise.api_server and not any(takes_api_server_time(pool) for pool in pools):
        yield "api_server", "requests take no time in API servers (api_server_s is 0)"
    if noise.links and not has_latency(network):
        yield "links", "transfers have no latency (network.latency_s is 0)"


def takes_api_server_time(pool: Pool) -> bool:
    """Return whether requests spend time in the API servers of this pool's engines, which noise may vary."""
    return api_server_time(pool) != ApiServerTime(0, 0)


def has_latency(network: Network) -> bool:
    """Return whether transfers have a latency, which noise may vary."""
    return any([network.latency_s, network.per_slice_s, *(link.latency_s for link in network.links)])


def _of_experts(index: int, pool: Pool) -> Iterator[Complaint]:
    if pool.ep == 1:
        yield _complaint(("pool", index, "expert_balancedness"), "every GPU has a slice of each expert (ep is 1)")
    elif not isinstance(pool.cost, RooflineCost):
        yield _complaint(("pool", index, "expert_balancedness"), "only cost model roofline counts it")
