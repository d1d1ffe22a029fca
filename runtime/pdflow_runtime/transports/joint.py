"""Two agents over one region: each is an endpoint with peers of its own, for whom the bytes are the same.

A store is written to under one name and read from under another; a prefill engine that loads reads under a second name
into the memory that it writes from. Each agent fences its own peers, and no others. The one that allocated the region
owns it, and is to be closed last.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from pdflow_runtime.transports.base import Transport, TransportError


@runtime_checkable
class Joining(Protocol):
    """A kind of agent that can use another agent's region."""

    def join(self, owner: Any) -> memoryview: ...


def join(agent: Transport, owner: Transport) -> memoryview:
    """Have an agent use the region that another has allocated, and return it as `allocate` would. TransportError."""
    if not isinstance(agent, Joining) or type(agent) is not type(owner):
        raise TransportError(
            f"transport {agent.name} cannot share one memory between two agents, which a store node needs"
        )
    return agent.join(owner)
