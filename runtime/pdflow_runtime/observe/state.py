"""The state of an engine, for people: pools, streams, and each request with the state that it is in."""

from __future__ import annotations

import msgspec

from pdflow.protocol.values import S
from pdflow_runtime.clock import now_ns
from pdflow_runtime.nodes.engine_node import LiveEngineNode
from pdflow_runtime.nodes.staging_memory import RoomState, room_state
from pdflow_runtime.store.backing import BackingState

MOST: int = 50
"""Requests that are shown, the oldest first."""


class RequestState(msgspec.Struct, frozen=True):
    request_id: str
    state: str
    age_s: float


class EngineState(msgspec.Struct, frozen=True, omit_defaults=True):
    engine: str
    role: str
    incarnation: str
    blocks: int
    free: int
    quarantined: int
    waiting: int
    loading: int
    running: int
    links: int
    steps: int
    open: int
    """Requests that the protocol or the engine knows of."""
    requests: list[RequestState]
    staging: RoomState | None = msgspec.field(default=None, name="beside")
    """The staging memory beside the blocks, where the method has any."""
    backing: BackingState | None = None
    """The storage server behind a store's node that has one."""


def state_of(node: LiveEngineNode) -> EngineState:
    engine, pool = node.engine, node.pool
    known = node.known()
    now = now_ns()
    shown = [
        RequestState(entry.request_id, entry.state, (now - entry.begun_ns) / S)
        for entry in sorted(known, key=lambda entry: entry.begun_ns)[:MOST]
    ]
    return EngineState(
        node.name,
        node.pool_role,
        f"{node.config.incarnation:016x}",
        pool.num_blocks,
        pool.free,
        pool.quarantined,
        engine.waiting,
        engine.loading,
        engine.running,
        len(node.links.links),
        engine.steps,
        len(known),
        shown,
        None if node.staging is None else room_state(node.staging),
    )
