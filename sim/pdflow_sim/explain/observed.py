"""A world whose engines also log which prompts each of their steps computed, and whose KV blocks are recorded.

Both only observe: all instants are those of the same world without them.
"""

from __future__ import annotations

from pdflow.engine.engine import Engine
from pdflow.protocol.ids import EngineInfo
from pdflow.protocol.values import EngineId
from pdflow.results.explanation.inter_token import StepPrompts
from pdflow.results.steps import Steps
from pdflow.scenario.schema.scenario import ResolvedScenario
from pdflow_sim.build import SimulationBuilder
from pdflow_sim.engine_slot import EngineSlot
from pdflow_sim.explain.observed_steps import ObservedSteps
from pdflow_sim.observe.recording import Recorder


class ObservedBuilder(SimulationBuilder):
    """Builds such a world."""

    def __init__(self, scenario: ResolvedScenario) -> None:
        self.kv = Recorder()
        super().__init__(scenario, recorder=self.kv)

    def logs(self, engine: EngineId) -> tuple[Steps, Steps]:
        """Return the step logs of an engine that decodes; the first lists prompts too."""
        self.metrics.steps.setdefault(engine, ObservedSteps())
        return super().logs(engine)

    def engine(self, slot: EngineSlot, info: EngineInfo, generation: int, *logs: Steps) -> Engine:
        """Return the engine of one incarnation, whose log looks at it."""
        made = super().engine(slot, info, generation, *logs)
        for log in logs:
            if isinstance(log, ObservedSteps):
                log.engine = made
        return made

    def step_prompts(self) -> dict[EngineId, StepPrompts]:
        """Return the prompts of each engine's steps."""
        return {name: log.prompts for name, log in self.metrics.steps.items() if isinstance(log, ObservedSteps)}
