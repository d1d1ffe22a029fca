"""Every duration of the protocol, with its unit and source. Deadlines are fields of cells; these are only lengths."""

from __future__ import annotations

from enum import IntEnum
from typing import TypeAlias

from pdflow.protocol.ids import Reg
from pdflow.protocol.values import MS, Address, EngineId, RequestId, S, Value, Xid


class Timers(Value, frozen=True, gc=False):
    """The durations of the protocol. Defaults are those of PROTOCOL 7.4 (strict) and 3.1 (vLLM 0.32.0)."""

    lease_ns: int = 30 * S
    """How long P keeps a finished prompt's blocks without a sign that D wants it (`kv_lease_duration`)."""
    lease_extension_ns: int = 20 * S
    """Extension of the lease by one heartbeat in vllm-compat: kv_lease_duration * 2 // 3."""
    heartbeat_ns: int = 5 * S
    """Between two heartbeats to one engine in vllm-compat: kv_lease_duration // 6."""
    release_lease_ns: int = 2 * S
    """Length of a lease after RELEASE: time for a REG that was overtaken."""
    registration_ttl_ns: int = 60 * S
    """How long P keeps a registration that nobody renews."""
    no_request_ns: int = 10 * S
    """How long a registration may wait for a prefill that P's scheduler does not know."""
    join_ns: int = 2 * S
    """vllm-compat (C4): how long matched blocks wait for the other D ranks' registrations."""
    sync_ns: int = 1 * S
    """Between two SYNCs to one engine."""
    reconnect_ns: int = 50 * MS
    """How soon after a connection is lost D sends the next SYNC, which reconnects and asks what has become of its
    requests."""
    suspect_ns: int = 5 * S
    dead_ns: int = 15 * S
    """Silence after which a peer's requests are resolved; their blocks stay in quarantine."""
    stall_ns: int = 30 * S
    """READY or IN FLIGHT without progress."""
    deadline_ns: int = 600 * S
    """Every request's total deadline at D, if it brings none of its own."""
    watchdog_ns: int = 480 * S
    """vllm-compat: `push_registration_timeout`, after which D resolves the request (C6)."""
    cancel_first_ns: int = 200 * MS
    cancel_last_ns: int = 2 * S
    backoff_first_ns: int = 1 * S
    backoff_last_ns: int = 60 * S
    """Negative cache of failed handshakes (C9)."""
    handshake_queue_ns: int = 5 * S
    transport_ns: int = 20 * S
    """vllm-compat quarantine: a handshake ahead in the queue, and a transport's retry budget with its margin."""


class TimerKind(IntEnum):
    """The kinds of timers. The checker fires any armed timer; drivers fire those that are due."""

    LEASE = 1
    """When P must stop new work on a finished prompt."""
    REGISTRATION = 2
    """When a registration that nobody renewed is given up."""
    JOIN = 3
    """When matched blocks stop waiting for lagging D ranks (vllm-compat)."""
    EXPECT = 4
    """When P asks its scheduler whether a registration's prefill exists at all."""
    DEADLINE = 5
    """When a D request is resolved whatever happens."""
    STALL = 6
    """When a transfer that P has begun shows no progress."""
    CANCEL = 7
    """When an unanswered CANCEL is sent again."""
    SYNC = 8
    """When D sends its SYNC (strict) or heartbeat (vllm-compat) to a peer with something open."""
    RECLAIM = 11
    """When a correctly running vLLM P can no longer start a write (vllm-compat quarantine)."""


TimerKey: TypeAlias = Reg | Xid | RequestId | Address | EngineId


class Timer(Value, frozen=True, gc=False):
    kind: TimerKind
    key: TimerKey
