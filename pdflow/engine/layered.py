"""When a step computes a layer whose KV is copied into blocks while the step runs (vLLM #18332).

A step that admits sequences with `loads_in_step` begins at once, and their KV is copied layer by layer: the copy of
layer i + 1 goes on while the step waits for layer i and computes it. The rule: a layer is computed when the layer
before it is, and when its KV of all these sequences is in blocks. The simulator takes the end of such a step from it; a
live engine asks it before each layer.
"""

from __future__ import annotations

from pdflow.cost.step import PS_PER_NS


class LayeredLoad:
    """The copies that one step waits for. Args: `layers` of the model, or of the rank with the most."""

    __slots__ = ("_landed_ns", "_left")

    def __init__(self, layers: int) -> None:
        self._left = [0] * layers
        self._landed_ns = [-1] * layers

    @property
    def layers(self) -> int:
        return len(self._left)

    @property
    def complete(self) -> bool:
        """Whether every layer has landed."""
        return not any(self._left)

    def begin(self, copies: int) -> None:
        """Take note of so many more copies of every layer, one by each rank."""
        self._left = [left + copies for left in self._left]

    def copied(self, layer: int, now: int) -> None:
        """Take note that one copy of a layer has ended."""
        if self._left[layer] <= 0:
            raise ValueError(f"no copy of layer {layer} is under way")
        self._left[layer] -= 1
        self._landed_ns[layer] = now

    def may_compute(self, layer: int) -> bool:
        """Whether the layer is computed next, as soon as the one before it has been."""
        return not self._left[layer]

    def end_ps(self, begun_ps: int, step_ps: int) -> int:
        """Return when the step ends that began at `begun_ps` and takes `step_ps` without waiting, which is divided
        equally among layers. All of them have landed."""
        if not self.complete:
            raise ValueError("the step still waits for a layer")
        layers = len(self._landed_ns)
        after = (
            landed_ns * PS_PER_NS + step_ps - step_ps * layer // layers
            for layer, landed_ns in enumerate(self._landed_ns)
        )
        return max(begun_ps + step_ps, *after)
