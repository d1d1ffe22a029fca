"""Every duration of the protocol, with its unit. Deadlines are fields of cells; these are only lengths (spec 5)."""

from __future__ import annotations

from enum import IntEnum
from typing import TypeAlias

from pdflow.protocol.ids import Reg
from pdflow.protocol.values import MS, Address, EngineId, RequestId, S, Value, Xid


class Timers(Value, frozen=True, gc=False):
    """The durations of the protocol. Those of vllm-compat and the lease have the defaults of vLLM 0.32.0."""

    lease_ns: int = 30 * S
    """How long P keeps a finished prompt's blocks if no D renews the lease (vLLM's `kv_lease_duration`)."""
    lease_extension_ns: int = 20 * S
    """vllm-compat: how far one heartbeat extends the lease, `kv_lease_duration * 2 // 3`."""
    heartbeat_ns: int = 5 * S
    """vllm-compat: time between two heartbeats to one engine, `kv_lease_duration // 6`."""
    release_lease_ns: int = 2 * S
    """How long a lease lasts after a RELEASE: time for a REG that the RELEASE has overtaken."""
    registration_ttl_ns: int = 60 * S
    """How long P keeps a registration that D does not renew."""
    no_request_ns: int = 10 * S
    """How long a registration waits for its prompt before P's rank asks its scheduler whether the prompt exists."""
    join_ns: int = 2 * S
    """vllm-compat: how long a matched prompt waits for the registrations of the other D ranks (C4)."""
    sync_ns: int = 1 * S
    """Time between two SYNCs to one engine, while anything is open."""
    reconnect_ns: int = 50 * MS
    """After a lost connection: time until D sends the next SYNC, which reconnects and asks for the state of its
    requests."""
    suspect_ns: int = 5 * S
    """Silence after which a peer is suspect: D admits little of it while much is in quarantine (spec 2.13)."""
    dead_ns: int = 15 * S
    """Silence after which D resolves a peer's requests; their blocks stay in quarantine until the peer is fenced."""
    stall_ns: int = 30 * S
    """How long a registration may be READY or IN_FLIGHT without progress."""
    deadline_ns: int = 600 * S
    """The total deadline of a request at D, unless the request has its own."""
    watchdog_ns: int = 480 * S
    """vllm-compat: vLLM's `push_registration_timeout`, after which D resolves the request (C6)."""
    cancel_first_ns: int = 200 * MS
    """Time until D repeats a CANCEL without an answer; it doubles each time."""
    cancel_last_ns: int = 2 * S
    """The longest time between two CANCELs."""
    backoff_first_ns: int = 1 * S
    """How long a peer is not tried again after one failed handshake; it doubles each time (C9)."""
    backoff_last_ns: int = 60 * S
    """The longest of these pauses."""
    handshake_queue_ns: int = 5 * S
    """vllm-compat, part of the reclaim time: a handshake that is ahead in P's queue."""
    transport_ns: int = 20 * S
    """vllm-compat, part of the reclaim time: the transport's own retries, with a margin."""


class TimerKind(IntEnum):
    """The kinds of timers. The checker fires any armed timer; drivers fire those that are due."""

    LEASE = 1
    """P stops new work on a finished prompt."""
    REGISTRATION = 2
    """P ends a registration that D has not renewed."""
    JOIN = 3
    """P stops waiting for D ranks that have not registered (vllm-compat)."""
    EXPECT = 4
    """P's rank asks its scheduler whether the prompt of a registration exists."""
    DEADLINE = 5
    """D resolves the request."""
    STALL = 6
    """D resolves a request whose transfer shows no progress."""
    CANCEL = 7
    """D repeats a CANCEL without an answer."""
    SYNC = 8
    """D sends a SYNC (strict) or a heartbeat (vllm-compat) to a peer with something open."""
    RECLAIM = 11
    """D frees blocks in quarantine: a correctly running vLLM P can no longer begin a WRITE (vllm-compat)."""


TimerKey: TypeAlias = Reg | Xid | RequestId | Address | EngineId


class Timer(Value, frozen=True, gc=False):
    kind: TimerKind
    key: TimerKey
