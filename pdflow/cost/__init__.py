"""Cost models of engine steps (constant, roofline, closed forms), specs of models and GPUs, and KV capacity."""

from pdflow.cost.capacity import ExtraBlocks, extra_blocks, kv_capacity_tokens
from pdflow.cost.layers import WindowSpec
from pdflow.cost.roofline import roofline
from pdflow.cost.specs import GpuSpec, MlaSpec, ModelSpec, MoeDims
from pdflow.cost.step import LinearTable, LinearTime, StepCost, constant

__all__ = [
    "ExtraBlocks",
    "GpuSpec",
    "LinearTable",
    "LinearTime",
    "MlaSpec",
    "ModelSpec",
    "MoeDims",
    "StepCost",
    "WindowSpec",
    "constant",
    "extra_blocks",
    "kv_capacity_tokens",
    "roofline",
]
