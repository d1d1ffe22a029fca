"""What a step takes: constant, roofline, and their closed forms; what a model and a GPU are; how much KV fits."""

from pdflow.cost.capacity import kv_capacity_tokens
from pdflow.cost.roofline import roofline
from pdflow.cost.specs import GpuSpec, MlaSpec, ModelSpec, MoeDims
from pdflow.cost.step import LinearTable, LinearTime, StepCost, constant

__all__ = [
    "GpuSpec",
    "LinearTable",
    "LinearTime",
    "MlaSpec",
    "ModelSpec",
    "MoeDims",
    "StepCost",
    "constant",
    "kv_capacity_tokens",
    "roofline",
]
