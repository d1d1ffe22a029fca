"""Links as resources, and flows that share them max-min fairly by path: exact integers, no clock of its own."""

from pdflow.network.network import FlowId, FlowNetwork, PathId, ResourceId

__all__ = ["FlowId", "FlowNetwork", "PathId", "ResourceId"]
