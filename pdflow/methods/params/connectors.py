"""The keys that each connector reads from `kv_connector_extra_config`, and defaults (SEED_SYSTEMS 1, 2, 4, 5a, 5b, 5d).

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

    proxy_ip: str = param(MAYBE_EMPTY, "where heartbeats go; empty for none", default="")
    proxy_port: int | None = param(MAYBE_PORT, "its ZMQ port; empty for no heartbeats", default=None)
    http_port: int | None = param(MAYBE_PORT, "the API server's --port, needed where a proxy is named", default=None)
    send_type: str = param(choice("PUT", "PUT_ASYNC", "GET"), "who moves KV, and when", default="PUT_ASYNC")
    mem_pool_size_gb: float = param(AMOUNT, "GiB of pinned memory behind the GPU buffer", default=32)
    nccl_num_channels: int = param(whole(1, 1_024), "channels of each 2-rank group: its GPU memory", default=8)

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
            raise ParamsError("http_port", "is missing where a proxy is named", PORT.expected)


@attrs.frozen(kw_only=True)
class CpuExtra:
    """`CPUConnector`, vLLM #18332."""

    host: str = param(TEXT, "D's side channel")
    port: int = param(PORT, "its ZMQ port of rank 0; rank r has r more")
    size: float = param(AMOUNT, "GiB of the ring in host memory")

    @property
    def ring_bytes(self) -> int:
        """The size of the ring, in bytes: whole pages of 4 KiB."""
        return int(self.size * GIB) // PAGE_BYTES * PAGE_BYTES


@attrs.frozen(kw_only=True)
class NixlExtra:
    """`NixlPushConnector` and `NixlPullConnector`, whose other name is `NixlConnector`, vLLM 0.32.0."""

    backends: tuple[str, ...] = param(NAMES, "of NIXL", default=("UCX",))
    num_threads: int = param(whole(0, 1_024), "of UCX, where it is the only backend", default=4)
    kv_lease_duration: int = param(whole(1, 1_000_000), "s that P keeps finished blocks", default=30)
    decoder_kv_blocks_ttl: float = param(TIMEOUT, "s that D keeps blocks for P, bidirectional", default=480)
    push_registration_timeout: float | None = param(
        TIMEOUT, "s of D's watchdog; decoder_kv_blocks_ttl if it is not said", default=None
    )
    bidirectional_kv_xfer: bool = param(TRUTH, "P may read from D; refused in push", default=False)
    kv_recompute_threshold: int = param(whole(0, 1 << 32), "bidirectional: fewer tokens are computed", default=64)
    engine_ttl: int = param(
        whole(-(1 << 32), 1 << 32), "s until an idle engine is forgotten, 0 or less for never", default=3600
    )
    enforce_handshake_compat: bool = param(TRUTH, "refuse peers of another version or mode", default=True)

    @property
    def watchdog_s(self) -> float:
        """The time limit of one registration at D, in seconds."""
        return self.decoder_kv_blocks_ttl if self.push_registration_timeout is None else self.push_registration_timeout


@attrs.frozen(kw_only=True)
class MooncakeV0Extra:
    """`MooncakeConnector` with a `kv_rank`, vLLM V0 (#10884): nothing, all else stands in its mooncake.json."""


@attrs.frozen(kw_only=True)
class MooncakeV1Extra:
    """`MooncakeConnector` without a `kv_rank`, vLLM 0.32.0."""

    num_workers: int = param(whole(1, 4_096), "sender threads of a P worker", default=10)
    mooncake_protocol: str = param(TEXT, "of the Transfer Engine", default="rdma")
    device_name: str = param(MAYBE_EMPTY, "NICs, with commas between; empty for all", default="")
    bootstrap_server_address: str | None = param(TEXT, "a server of its own, where P has none", default=None)


@attrs.frozen(kw_only=True)
class MooncakeStoreExtra:
    """`MooncakeStoreConnector`, vLLM 0.32.0; that of V0 reads none of these."""

    load_async: bool = param(TRUTH, "requests wait for their KV out of the running batch", default=True)
    lookup_async: bool = param(TRUTH, "the scheduler does not wait for a lookup", default=False)
    enable_lookup: bool = param(TRUTH, "the store is asked at all", default=True)
    save_decode_cache: bool = param(TRUTH, "KV of generated tokens is stored too", default=False)
