"""Which prompts a decode engine computes itself, because sending them to P and their KV back would take longer.

What counts is the part of a prompt that D does not have already, and what D would be kept from doing meanwhile. Where
the thresholds come from is not decided here (`pdflow.cost.crossover`).
"""

from __future__ import annotations

from pdflow.protocol.values import Value


class Disaggregation(Value, frozen=True, gc=False):
    """`above[engine][legs]`: by decode engine, and by how many legs are open there, the most tokens that stay; the last
    number of legs stands for all more."""

    above: tuple[tuple[int, ...], ...]

    def keeps(self, tokens: int, engine: int, legs: int) -> bool:
        """Whether this engine computes so many tokens itself."""
        above = self.above[engine]
        return tokens <= above[min(legs, len(above) - 1)]
