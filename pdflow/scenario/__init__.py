"""Scenario files: their schema, and how one becomes a checked Scenario."""

from pdflow.scenario.reading.load import load
from pdflow.scenario.schema.scenario import ResolvedScenario
from pdflow.scenario.validation.fit import kv_shape_of, kv_tokens_of

__all__ = ["ResolvedScenario", "kv_shape_of", "kv_tokens_of", "load"]
