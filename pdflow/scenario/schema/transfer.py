"""The schema of [transfer]: method, dialect and the protocol's timers, whose defaults are those of spec 5.1.

The other tables, and how to read this class, are in `scenario.py`.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import attrs
from attrs import field

from pdflow.methods.mooncake import NUM_WORKERS
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
        default="nixl-push", metadata=field_doc("how bytes go from P to D: `pdflow methods` says what each does")
    )
    config: str | None = field(
        default=None,
        metadata=field_doc(
            "a mooncake.json or vLLM's --kv-transfer-config as a file, relative to the scenario file: it says what "
            "[transfer] and [network] leave out",
            NOT_EMPTY,
        ),
    )
    dialect: DialectName = field(
        default="strict",
        metadata=field_doc(
            "whose rules: ours, or the original's (as-published; of nixl-* vllm-stock: simulate only); of nixl-* also "
            "vLLM 0.32's frames with the fixes C1 to C13"
        ),
    )
    progressive: bool = field(
        default=False,
        metadata=field_doc(
            "nixl-push, mooncake-v1: P writes layer by layer and chunk by chunk, while it computes what follows"
        ),
    )
    kv_buffer_device: Literal["cuda", "cpu"] = field(
        default="cuda",
        metadata=field_doc("nixl-*, mooncake-v1: cpu stages every transfer in host memory on both sides"),
    )
    host_buffer_bytes: int = field(
        default=8_000_000_000, metadata=field_doc("cpu-staged: each rank's ring of pinned host memory", AT_LEAST_ONE)
    )
    kv_buffer_size: int = field(
        default=1_000_000_000,
        metadata=field_doc(
            "p2p-nccl-*: D's GPU buffer, or P's store for GET; mooncake-v0: P's lookup buffer; in bytes of a rank",
            AT_LEAST_ONE,
        ),
    )
    mem_pool_size_gb: int = field(
        default=32,
        metadata=field_doc("p2p-nccl-put*: D's pinned host pool behind that buffer, of a rank", NOT_NEGATIVE),
    )
    pickle_bytes_per_s: int = field(
        default=1_000_000_000,
        metadata=field_doc("mooncake-v0 as published: what a thread of a rank pickles, or takes apart", AT_LEAST_ONE),
    )
    nccl_num_channels: int = field(
        default=8,
        metadata=field_doc("p2p-nccl-*: channels of each group of two ranks: 52 MB at 8, 100 MB at 16", AT_LEAST_ONE),
    )
    nccl_max_groups: int | None = field(
        default=None,
        metadata=field_doc(
            "p2p-nccl-*: groups that a rank keeps at most; for another goes the one that has been idle for longest, "
            "and to make it again takes network.handshake_s; all are kept if absent",
            AT_LEAST_ONE,
        ),
    )
    num_workers: int = field(
        default=NUM_WORKERS,
        metadata=field_doc("mooncake-v1: threads of each P rank that write prompts, one at a time each", AT_LEAST_ONE),
    )
    store_nodes: int = field(default=1, metadata=field_doc("kv-store: nodes of the store, beside D's", ENGINES))
    store_bytes: int = field(default=512_000_000_000, metadata=field_doc("kv-store: memory of one node", AT_LEAST_ONE))
    store_granularity: GranularityName = field(
        default="prompt",
        metadata=field_doc("kv-store: what has a key: a prompt, or each block of it, which others find and P loads"),
    )
    store_keep: bool = field(
        default=True, metadata=field_doc("kv-store: what D has got stays for others (get), or goes (drop_select)")
    )
    store_hidden_states: bool = field(
        default=False,
        metadata=field_doc("kv-store: the prompt's hidden states are stored beside its KV, as published always"),
    )
    store_lease_s: float = field(
        default=10.0, metadata=field_doc("kv-store: an object stays for whoever is to get it, unless renewed", TIMER)
    )
    store_high_water: float = field(
        default=0.9, metadata=field_doc("kv-store: share of a node's memory above which it evicts", FRACTION)
    )
    kv_lease_duration_s: float = field(
        default=30.0, metadata=field_doc("P holds finished blocks this long unless renewed", TIMER)
    )
    deadline_s: float = field(default=600.0, metadata=field_doc("a request's total deadline", TIMER))
    sync_s: float = field(default=1.0, metadata=field_doc("between SYNCs of a pair with something open", TIMER))
    reconnect_s: float = field(default=0.05, metadata=field_doc("from a lost connection to the next SYNC", TIMER))
    stall_s: float = field(default=30.0, metadata=field_doc("no progress of a ready or running transfer", TIMER))
    suspect_s: float = field(default=5.0, metadata=field_doc("silence after which a peer is suspect", TIMER))
    dead_s: float = field(default=15.0, metadata=field_doc("silence after which a peer's requests are given up", TIMER))
    registration_ttl_s: float = field(default=60.0, metadata=field_doc("P keeps an unrenewed registration", TIMER))
    no_request_s: float = field(
        default=10.0,
        metadata=field_doc("P answers NO_REQUEST when a registration finds no prefill for this long", TIMER),
    )
    release_lease_s: float = field(default=2.0, metadata=field_doc("the lease that RELEASE shortens to", TIMER))
    cancel_first_s: float = field(default=0.2, metadata=field_doc("first retransmission of CANCEL", TIMER))
    cancel_last_s: float = field(default=2.0, metadata=field_doc("longest gap between CANCELs", TIMER))
    handshake_timeout_s: float = field(default=5.0, metadata=field_doc("a handshake's reply, per rank", TIMER))
    backoff_first_s: float = field(default=1.0, metadata=field_doc("pause after a failed handshake", TIMER))
    backoff_last_s: float = field(default=60.0, metadata=field_doc("longest pause after failed handshakes", TIMER))
    push_registration_timeout_s: float = field(
        default=480.0, metadata=field_doc("vllm-compat: D's watchdog over a registration", TIMER)
    )
    join_s: float = field(
        default=2.0, metadata=field_doc("vllm-compat: P waits this long for the other ranks' registrations", TIMER)
    )
    writer_poll_s: float = field(default=0.001, metadata=field_doc("vllm-compat push: the writer thread's poll", DELAY))
    quarantine_fraction: float = field(
        default=0.25, metadata=field_doc("share of D's pool that one peer may hold registered or quarantined", FRACTION)
    )
    quarantine_suspect_fraction: float = field(
        default=0.10,
        metadata=field_doc("share of D's pool in quarantine above which suspect peers get nothing", FRACTION),
    )

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
