"""Scenario files: what they can say, and how one becomes a checked Scenario."""

from pdflow.scenario.fit import kv_shape_of, kv_tokens_of
from pdflow.scenario.load import load
from pdflow.scenario.schema import Scenario

__all__ = ["Scenario", "kv_shape_of", "kv_tokens_of", "load"]
