"""The keys that each connector reads from `kv_connector_extra_config`, and defaults.

Keys that are not here are skipped, as the originals skip them; `config.py` says which those were.
"""

from __future__ import annotations

import attrs

from pdflow.methods.params.errors import ParamsError
from pdflow.methods.params.fields import param
from pdflow.methods.params.settings import (
    AMOUNT,
    MAYBE_EMPTY,
    MAYBE_PORT,
    NAMES,
    PORT,
    TEXT,
    TIMEOUT,
    TRUTH,
    choice,
    whole,
)

GIB = 1 << 30
PAGE_BYTES = 4_096


@attrs.frozen(kw_only=True)
class P2pNcclExtra:
    """`P2pNcclConnector`, vLLM #18242."""

    proxy_ip: str = param(MAYBE_EMPTY, "address for heartbeats; empty: none", default="")
    proxy_port: int | None = param(MAYBE_PORT, "ZMQ port of the proxy; empty: no heartbeats", default=None)
    http_port: int | None = param(MAYBE_PORT, "--port of the API server; required with a proxy", default=None)
    send_type: str = param(choice("PUT", "PUT_ASYNC", "GET"), "which engine moves KV, and when", default="PUT_ASYNC")
    mem_pool_size_gb: float = param(AMOUNT, "GiB of pinned host memory that the GPU buffer spills to", default=32)
    nccl_num_channels: int = param(whole(1, 1_024), "channels of each NCCL group; each takes GPU memory", default=8)

    @property
    def registers(self) -> bool:
        """Whether the engine sends heartbeats to a proxy."""
        return bool(self.proxy_ip) and self.proxy_port is not None

    @property
    def mem_pool_bytes(self) -> int:
        """The size of the pool, rounded up to a power of two, as the buddy pool has it."""
        return 1 << (max(1, int(self.mem_pool_size_gb * GIB)) - 1).bit_length()

    def __attrs_post_init__(self) -> None:
        if self.registers and self.http_port is None:
            raise ParamsError("http_port", "is missing, and a proxy is named", PORT.expected)


@attrs.frozen(kw_only=True)
class CpuExtra:
    """`CPUConnector`, vLLM #18332."""

    host: str = param(TEXT, "host of D's side channel")
    port: int = param(PORT, "ZMQ port of rank 0; rank r adds r")
    size: float = param(AMOUNT, "size in GiB of the ring in host memory")

    @property
    def ring_bytes(self) -> int:
        """The size of the ring, in bytes: whole pages of 4 KiB."""
        return int(self.size * GIB) // PAGE_BYTES * PAGE_BYTES


@attrs.frozen(kw_only=True)
class NixlExtra:
    """`NixlPushConnector` and `NixlPullConnector`, also named `NixlConnector`, vLLM 0.32.0."""

    backends: tuple[str, ...] = param(NAMES, "NIXL backends", default=("UCX",))
    num_threads: int = param(whole(0, 1_024), "UCX threads, if UCX is the only backend", default=4)
    kv_lease_duration: int = param(whole(1, 1_000_000), "seconds that P keeps finished blocks", default=30)
    decoder_kv_blocks_ttl: float = param(TIMEOUT, "bidirectional: seconds that D keeps blocks for P", default=480)
    push_registration_timeout: float | None = param(
        TIMEOUT, "seconds of D's watchdog; if absent, decoder_kv_blocks_ttl", default=None
    )
    bidirectional_kv_xfer: bool = param(TRUTH, "P may read from D; refused in push", default=False)
    kv_recompute_threshold: int = param(
        whole(0, 1 << 32), "bidirectional: P computes fewer tokens than this", default=64
    )
    engine_ttl: int = param(
        whole(-(1 << 32), 1 << 32), "seconds until an idle engine is forgotten; 0 or less: never", default=3600
    )
    enforce_handshake_compat: bool = param(TRUTH, "refuse peers of another version or mode", default=True)

    @property
    def watchdog_s(self) -> float:
        """The time limit of one registration at D, in seconds."""
        return self.decoder_kv_blocks_ttl if self.push_registration_timeout is None else self.push_registration_timeout


@attrs.frozen(kw_only=True)
class MooncakeV0Extra:
    """`MooncakeConnector` with a `kv_rank`, vLLM V0 (#10884): no keys, all settings are in its mooncake.json."""


@attrs.frozen(kw_only=True)
class MooncakeV1Extra:
    """`MooncakeConnector` without a `kv_rank`, vLLM 0.32.0."""

    num_workers: int = param(whole(1, 4_096), "sender threads of a P worker", default=10)
    mooncake_protocol: str = param(TEXT, "protocol of the Transfer Engine", default="rdma")
    device_name: str = param(MAYBE_EMPTY, "NICs, separated by commas; empty: all", default="")
    bootstrap_server_address: str | None = param(TEXT, "a separate bootstrap server, if P has none", default=None)


@attrs.frozen(kw_only=True)
class MooncakeStoreExtra:
    """`MooncakeStoreConnector`, vLLM 0.32.0; V0's connector reads none of these."""

    load_async: bool = param(TRUTH, "requests wait for their KV outside the running batch", default=True)
    lookup_async: bool = param(TRUTH, "the scheduler does not wait for a lookup", default=False)
    enable_lookup: bool = param(TRUTH, "whether the scheduler looks prompts up in the store", default=True)
    save_decode_cache: bool = param(TRUTH, "KV of generated tokens is stored too", default=False)
