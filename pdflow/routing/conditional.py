"""Conditional disaggregation: a decode engine computes a prompt itself where a transfer from P would take longer.

This depends on the part of the prompt that D does not have already, and on the decoding that D would delay meanwhile.
The thresholds come from `pdflow.cost.crossover`.
"""

from __future__ import annotations

from pdflow.protocol.values import Value


class Disaggregation(Value, frozen=True, gc=False):
    """The thresholds of conditional disaggregation.

    `above[engine][legs]`: the most tokens that a decode engine with so many open legs computes itself; the last entry
    counts for all more legs.
    """

    above: tuple[tuple[int, ...], ...]

    def keeps(self, tokens: int, engine: int, legs: int) -> bool:
        """Whether this engine, with so many open legs, computes so many tokens itself."""
        above = self.above[engine]
        return tokens <= above[min(legs, len(above) - 1)]
