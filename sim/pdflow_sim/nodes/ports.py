"""The ports through which nodes reach the rest of a run, and the components of an engine's node.

A node knows these ports and nothing above them: not the clients, not the faults, not the run as a whole.
"""

from __future__ import annotations

import attrs

from pdflow.engine.engine import Engine
from pdflow.methods.posting import ReadThread
from pdflow.protocol.values import EngineId
from pdflow_sim.clients.prompt_content import PromptContent
from pdflow_sim.clock import Clock
from pdflow_sim.network.fabric import Fabric
from pdflow_sim.network.shipping import Shipping
from pdflow_sim.nodes.router_link import RouterLink
from pdflow_sim.observe.run_metrics import RunMetrics


@attrs.frozen(kw_only=True)
class NodePorts:
    """The ports of the nodes: one set for all nodes of a run."""

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
    """The components of one incarnation of an engine."""

    ports: NodePorts
    index: int
    """The engine's number among all engines: orders those that act at one instant."""
    name: EngineId
    engine: Engine
    block_bytes: int
    reads_on: ReadThread = "background"
    """The thread of a decode engine that posts its READs."""
