"""What nodes share with the rest of a run: the ports through which they reach it, and what an engine's node is made of.

A node knows these ports and nothing above them: not the clients, not the faults, not the run as a whole.
"""

from __future__ import annotations

import attrs

from pdflow.engine.engine import Engine
from pdflow.protocol.values import EngineId
from pdflow_sim.clients.prompt_content import PromptContent
from pdflow_sim.clock import Clock
from pdflow_sim.network.fabric import Fabric
from pdflow_sim.network.shipping import Shipping
from pdflow_sim.nodes.router_link import RouterLink
from pdflow_sim.observe.run_metrics import RunMetrics


@attrs.frozen(kw_only=True)
class NodePorts:
    """One set for all nodes of a run."""

    clock: Clock
    metrics: RunMetrics
    fabric: Fabric
    """The network: where messages and one-sided operations are sent."""
    shipping: Shipping | None = None
    """Carries operations that go in pieces or a few at a time, where the method has any."""
    router: RouterLink
    """Where engines send their answers."""
    prompts: PromptContent
    poll_ns: int = 0
    """How often an engine without work polls for what has come; 0 if whatever comes is handled at once."""
    writer_ns: int = 0
    """How often P's writer thread polls by itself; 0 if there is none."""
    prefill_tokens: int = 0
    """Tokens of the answer that P's first token stands for: 1 with first_token = "prefill"."""


@attrs.frozen(kw_only=True)
class EngineComponents:
    """One incarnation of an engine."""

    ports: NodePorts
    index: int
    """Among all engines: orders those that act at one instant."""
    name: EngineId
    engine: Engine
    block_bytes: int
