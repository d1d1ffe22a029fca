"""The schema of [transfer]: method, dialect and the protocol's timers, whose defaults are those of spec 5.1.

The other tables, and how to read this class, are in `scenario.py`.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import attrs
from attrs import field

from pdflow.methods.catalogue import METHODS
from pdflow.methods.method import Method
from pdflow.methods.mooncake import NUM_WORKERS
from pdflow.methods.posting import CONNECTORS, Connector, ConnectorName, ReadThread
from pdflow.protocol.timers import Timers
from pdflow.scenario.schema.fields import (
    AT_LEAST_ONE,
    DELAY,
    ENGINES,
    FRACTION,
    NOT_EMPTY,
    NOT_NEGATIVE,
    TIMER,
    field_doc,
    seconds_to_ns,
)

MethodName: TypeAlias = Literal[
    "nixl-push",
    "nixl-pull",
    "cpu-staged",
    "p2p-nccl-put",
    "p2p-nccl-put-async",
    "p2p-nccl-get",
    "kv-store",
    "mooncake-v0",
    "mooncake-v1",
]
GranularityName: TypeAlias = Literal["prompt", "block"]
DialectName: TypeAlias = Literal["strict", "as-published", "vllm-compat", "vllm-stock"]


@attrs.frozen(kw_only=True)
class Transfer:
    """[transfer]: how KV moves, and the protocol's timers."""

    method: MethodName = field(
        default="nixl-push", metadata=field_doc("how KV moves from P to D; `pdflow methods` describes each method")
    )
    config: str | None = field(
        default=None,
        metadata=field_doc(
            "file with a mooncake.json or vLLM's --kv-transfer-config, relative to the scenario file; it "
            "supplies values that [transfer] and [network] do not set",
            NOT_EMPTY,
        ),
    )
    dialect: DialectName = field(
        default="strict",
        metadata=field_doc(
            "protocol rules. strict: pdflow's own. as-published: those of the original system. nixl-* only: "
            "vllm-stock, vLLM 0.32 unchanged (simulate only); vllm-compat, vLLM 0.32's frames with the fixes "
            "C1 to C13"
        ),
    )
    connector: ConnectorName | None = field(
        default=None,
        metadata=field_doc(
            "the implementation whose posting is simulated: descriptors of a block, and the thread that posts READs; "
            "default: vllm-nixl for nixl-*, vllm-mooncake for mooncake-v1, otherwise per-tensor"
        ),
    )
    reads_on: ReadThread | None = field(
        default=None,
        metadata=field_doc(
            "the thread of D that posts READs. engine: that of its steps, before each step; overlapped: the same, "
            "during the step; background: another; default: the connector's"
        ),
    )
    progressive: bool = field(
        default=False,
        metadata=field_doc(
            "nixl-push, mooncake-v1: P writes each layer of each chunk as soon as it is computed, during the prefill"
        ),
    )
    load_by_layer: bool | None = field(
        default=None,
        metadata=field_doc(
            "cpu-staged: D copies a prompt's KV into its blocks layer by layer while the prompt's first step computes, "
            "and the step waits for each layer; false: D copies all of it before that step; default: true with "
            "as-published, otherwise false"
        ),
    )
    kv_buffer_device: Literal["cuda", "cpu"] = field(
        default="cuda",
        metadata=field_doc(
            "nixl-*, mooncake-v1, kv-store: cpu copies every transfer through host memory on both sides. `pdflow "
            'serve`: the memory from which engines with device = "cuda" transfer KV, with any method'
        ),
    )
    host_buffer_bytes: int = field(
        default=8_000_000_000,
        metadata=field_doc("cpu-staged: size of each rank's ring in pinned host memory", AT_LEAST_ONE),
    )
    kv_buffer_size: int = field(
        default=1_000_000_000,
        metadata=field_doc(
            "p2p-nccl-*: bytes per rank of D's GPU buffer (with GET: of P's store); mooncake-v0: of P's lookup buffer",
            AT_LEAST_ONE,
        ),
    )
    mem_pool_size_gb: int = field(
        default=32,
        metadata=field_doc(
            "p2p-nccl-put*: size per rank of D's pinned host pool, used when that buffer is full", NOT_NEGATIVE
        ),
    )
    pickle_bytes_per_s: int = field(
        default=1_000_000_000,
        metadata=field_doc("mooncake-v0 as-published: rate at which one thread pickles or unpickles", AT_LEAST_ONE),
    )
    nccl_num_channels: int = field(
        default=8,
        metadata=field_doc(
            "p2p-nccl-*: NCCL channels of each group of two ranks; a group takes 52 MB with 8 and 100 MB with 16",
            AT_LEAST_ONE,
        ),
    )
    nccl_max_groups: int | None = field(
        default=None,
        metadata=field_doc(
            "p2p-nccl-*: maximum number of groups per rank; a new group evicts the one that has been idle "
            "longest, and creating that one again takes network.handshake_s; default: no limit",
            AT_LEAST_ONE,
        ),
    )
    num_workers: int = field(
        default=NUM_WORKERS,
        metadata=field_doc(
            "mooncake-v1: writer threads of each P rank; each writes one prompt at a time", AT_LEAST_ONE
        ),
    )
    store_nodes: int = field(default=1, metadata=field_doc("kv-store: number of store nodes", ENGINES))
    store_bytes: int = field(default=512_000_000_000, metadata=field_doc("kv-store: memory of each node", AT_LEAST_ONE))
    store_granularity: GranularityName = field(
        default="prompt",
        metadata=field_doc(
            "kv-store: prompt stores each prompt under one key; block stores each block under its own, so "
            "that P can load blocks of earlier prompts"
        ),
    )
    store_keep: bool = field(
        default=True,
        metadata=field_doc(
            "kv-store: whether an object stays in the store after D has read it (get) or is removed (drop_select)"
        ),
    )
    store_hidden_states: bool = field(
        default=False,
        metadata=field_doc("kv-store: also store the prompt's hidden states, as the original always does"),
    )
    store_lease_s: float = field(
        default=10.0,
        metadata=field_doc(
            "kv-store: how long an object is kept for its reader unless the reader renews the lease", TIMER
        ),
    )
    store_high_water: float = field(
        default=0.9, metadata=field_doc("kv-store: share of a node's memory above which the node evicts", FRACTION)
    )
    kv_lease_duration_s: float = field(
        default=30.0,
        metadata=field_doc("how long P holds the blocks of a finished prompt unless D renews the lease", TIMER),
    )
    deadline_s: float = field(default=600.0, metadata=field_doc("deadline of a whole request", TIMER))
    sync_s: float = field(
        default=1.0, metadata=field_doc("interval of SYNC messages between two ranks that have open requests", TIMER)
    )
    reconnect_s: float = field(default=0.05, metadata=field_doc("time from a lost connection to the next SYNC", TIMER))
    stall_s: float = field(
        default=30.0, metadata=field_doc("a ready or running transfer fails after this time without progress", TIMER)
    )
    suspect_s: float = field(
        default=5.0, metadata=field_doc("time without messages after which a peer is suspect", TIMER)
    )
    dead_s: float = field(
        default=15.0,
        metadata=field_doc("time without messages after which a peer is dead and its requests fail", TIMER),
    )
    registration_ttl_s: float = field(
        default=60.0, metadata=field_doc("how long P keeps a registration that is not renewed", TIMER)
    )
    no_request_s: float = field(
        default=10.0,
        metadata=field_doc(
            "P answers NO_REQUEST to a registration that has had no matching prefill for this long", TIMER
        ),
    )
    release_lease_s: float = field(default=2.0, metadata=field_doc("lease that remains after RELEASE", TIMER))
    cancel_first_s: float = field(
        default=0.2, metadata=field_doc("time before the first retransmission of CANCEL", TIMER)
    )
    cancel_last_s: float = field(
        default=2.0, metadata=field_doc("longest interval between retransmissions of CANCEL", TIMER)
    )
    handshake_timeout_s: float = field(
        default=5.0, metadata=field_doc("how long a rank waits for the reply to a handshake", TIMER)
    )
    backoff_first_s: float = field(
        default=1.0, metadata=field_doc("pause after the first failed handshake with a peer", TIMER)
    )
    backoff_last_s: float = field(
        default=60.0, metadata=field_doc("longest pause after repeated failed handshakes", TIMER)
    )
    push_registration_timeout_s: float = field(
        default=480.0, metadata=field_doc("vllm-compat: D's watchdog for a registration", TIMER)
    )
    join_s: float = field(
        default=2.0, metadata=field_doc("vllm-compat: how long P waits for the registrations of D's other ranks", TIMER)
    )
    writer_poll_s: float = field(
        default=0.001, metadata=field_doc("vllm-compat push: poll interval of P's writer thread", DELAY)
    )
    quarantine_fraction: float = field(
        default=0.25,
        metadata=field_doc(
            "share of D's KV blocks that may be registered with, or in quarantine for, one prefill engine", FRACTION
        ),
    )
    quarantine_suspect_fraction: float = field(
        default=0.10,
        metadata=field_doc(
            "share of D's KV blocks in quarantine above which D admits no requests of suspect peers", FRACTION
        ),
    )

    def adapted_method(self) -> Method:
        """Return the method with this table's options."""
        through_host = self.kv_buffer_device == "cpu"
        return METHODS[self.method].adapted(self.progressive, through_host, self.num_workers, self.load_by_layer)

    def read_thread(self) -> ReadThread | None:
        """Return the thread of D that posts READs; None if D posts none, or if its next step waits for them anyway."""
        method = METHODS[self.method]
        waits = method.pipeline_policy(self.dialect).decode_waits
        return self.posting().reads_on if method.pulls and not waits else None

    def posting(self) -> Connector:
        """Return the connector whose posting is simulated, with the thread that this table names."""
        connector = CONNECTORS[self.connector or METHODS[self.method].connector]
        return connector if self.reads_on is None else attrs.evolve(connector, reads_on=self.reads_on)

    def timers(self) -> Timers:
        """Return the protocol's durations; those that vLLM derives from the lease are derived as there."""
        lease_ns = seconds_to_ns(self.kv_lease_duration_s)
        return Timers(
            lease_ns=lease_ns,
            lease_extension_ns=lease_ns * 2 // 3,
            heartbeat_ns=lease_ns // 6,
            release_lease_ns=seconds_to_ns(self.release_lease_s),
            registration_ttl_ns=seconds_to_ns(self.registration_ttl_s),
            no_request_ns=seconds_to_ns(self.no_request_s),
            join_ns=seconds_to_ns(self.join_s),
            sync_ns=seconds_to_ns(self.sync_s),
            reconnect_ns=seconds_to_ns(self.reconnect_s),
            suspect_ns=seconds_to_ns(self.suspect_s),
            dead_ns=seconds_to_ns(self.dead_s),
            stall_ns=seconds_to_ns(self.stall_s),
            deadline_ns=seconds_to_ns(self.deadline_s),
            watchdog_ns=seconds_to_ns(self.push_registration_timeout_s),
            cancel_first_ns=seconds_to_ns(self.cancel_first_s),
            cancel_last_ns=seconds_to_ns(self.cancel_last_s),
            backoff_first_ns=seconds_to_ns(self.backoff_first_s),
            backoff_last_ns=seconds_to_ns(self.backoff_last_s),
            handshake_queue_ns=seconds_to_ns(self.handshake_timeout_s),
        )
