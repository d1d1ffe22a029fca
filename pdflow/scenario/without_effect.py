"""The keys of a transfer configuration that change nothing in a scenario, and why.

Addresses, ports, roles and ranks say how processes find each other, which a scenario knows from its pools. A key that
changes what the original does, and that pdflow does not honour, has a reason here, which becomes a note of the scenario
unless the key has its default.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import attrs

from pdflow.methods.params.config import EXTRA, KvTransferConfig
from pdflow.methods.params.connectors import MooncakeV1Extra
from pdflow.methods.params.metadata import ASSUMED
from pdflow.methods.params.mooncake_json import PORTS_APART, PROTOCOLS, File, PipeFile
from pdflow.scenario.reading.locate import KeyPath

REASONS: Final[Mapping[str, str]] = {
    "kv_load_failure_policy": "router.on_failure decides what follows a failed load",
    "backends": "NIXL's backend is known by its speed and latency; set those in [network]",
    "num_threads": "one thread of each rank posts",
    "bidirectional_kv_xfer": "P never reads from D",
    "kv_recompute_threshold": "P never reads from D",
    "engine_ttl": "an idle engine is not forgotten",
    "enforce_handshake_compat": "all engines of a scenario have the same version",
    "load_async": "a request always waits for its KV outside the running batch",
    "lookup_async": "the scheduler waits for a lookup",
    "enable_lookup": "D always looks its prompt up in the store",
    "save_decode_cache": "KV of generated tokens is not stored",
    "local_buffer_size": "a transfer does not wait for a local buffer",
    "enable_offload": "the store has no SSDs",
    "mode": "the file does not give the memory of a standalone store; set transfer.store_bytes",
    "kv_buffer_device": "this connector transfers KV from one kind of memory only",
    "device_name": "names of NICs are for rdma",
}
"""Why a key that is not an address has no effect. Elsewhere, the reason is that only the other engine has the thing."""

HONOURED: Final = frozenset(
    (
        *("kv_connector", "kv_role", "kv_rank", "kv_parallel_size", "send_type", EXTRA, "protocol", "prefill_url"),
        *("mooncake_protocol", "master_server_address"),
    )
)
"""Keys that choose the method, the side or the network, perhaps by leaving them as they are."""


def keys_without_effect(
    config: KvTransferConfig | File, found: Mapping[Any, Any], used: frozenset[KeyPath]
) -> tuple[KeyPath, ...]:
    """Return the keys of a file that pdflow reads, and that no value of a scenario is from."""
    inner = found.get(EXTRA)
    inside = [(EXTRA, key) for key in inner] if isinstance(inner, Mapping) else []
    known: set[KeyPath] = {(name,) for name in _values(config)}
    if isinstance(config, KvTransferConfig):
        known |= {(EXTRA, name) for name in _values(config.kv_connector_extra_config)}
    given: list[KeyPath] = [*((key,) for key in found), *inside]
    return tuple(path for path in given if path in known and path not in used and path[-1] not in HONOURED)


def notes_on(config: KvTransferConfig | File, without_effect: tuple[KeyPath, ...]) -> Iterator[tuple[KeyPath, str]]:
    """Yield what a scenario does not honour of these keys, and why, each with the key that says it."""
    for path in without_effect:
        inside = isinstance(config, KvTransferConfig) and len(path) > 1
        holder = config.kv_connector_extra_config if inside and isinstance(config, KvTransferConfig) else config
        name = str(path[-1])
        field = getattr(attrs.fields(type(holder)), name)
        if name == "metadata_server":
            yield from _on_metadata(config, path)
        elif name in REASONS and getattr(holder, name) != field.default:
            yield path, f"{name} has no effect: {REASONS[name]}"
    if isinstance(config, KvTransferConfig) and isinstance(config.kv_connector_extra_config, MooncakeV1Extra):
        protocol = config.kv_connector_extra_config.mooncake_protocol
        if protocol not in PROTOCOLS:
            path = (EXTRA, "mooncake_protocol")
            yield path, f"mooncake_protocol {protocol} has no preset of its own; set [network]"
    if isinstance(config, PipeFile) and config.ports_apart is not None and config.ports_apart < PORTS_APART:
        apart = f"decode_url has a port {config.ports_apart} from prefill_url's, on the same host"
        yield ("decode_url",), f"{apart}: enough for tp = {config.room}; Mooncake asks for {PORTS_APART}"


def _on_metadata(config: KvTransferConfig | File, path: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    url = None if isinstance(config, KvTransferConfig) else config.metadata_url
    if url is None:
        return
    kind = url.partition("://")[0]
    assumed = kind == ASSUMED and not isinstance(config, KvTransferConfig) and "://" not in config.metadata_server
    named = isinstance(config, PipeFile) and config.metadata_backend is not None
    by_rule = ", which Mooncake assumes without a scheme" if assumed and not named else ""
    names = f"metadata_server names {kind}{by_rule}, and no engine contacts it"
    yield path, f"{names}: engines exchange their addresses in the handshake (network.handshake_s)"


def _values(holder: Any) -> list[str]:
    return [field.name for field in attrs.fields(type(holder)) if field.name != "unread"]
