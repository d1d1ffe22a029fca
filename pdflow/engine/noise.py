"""The noise of an engine's steps: how much each lasts longer or shorter than its cost model says.

A step that computes prompts has a draw of its own, in proportion to its duration. Decode steps are planned many at once
and therefore share a draw for a run of steps, smaller by the square root of its length: over many steps their sum
varies as if each had its own. It is in proportion to a decode step without context, so that the steps of a run still
form an arithmetic progression.

Draws come from a table that the driver has drawn: the engine's results depend on it and on the number of the step
alone, not on how many steps are planned at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt
from typing import Final

from pdflow.cost.step import StepCost

RUN: Final = 1024
"""Decode steps that share a draw. Each run is planned anew, which costs the simulation time."""
MILLION: Final = 1_000_000


class StepNoise:
    """The noise of one engine. Args:

    ppm: draws with mean 0 in millionths of a step, used in turn.
    begin: the first of them that is used.
    run: decode steps that share a draw, a square number.
    """

    __slots__ = ("_begin", "_cost", "_decode_ps", "_ppm", "_root", "_run")

    def __init__(self, ppm: Sequence[int], begin: int, cost: StepCost, run: int = RUN) -> None:
        self._ppm = ppm
        self._begin = begin
        self._cost = cost
        self._run = run
        self._root = isqrt(run)
        # By number of sequences that decode: a step without context.
        self._decode_ps: list[int] = []

    def chunk_step_ps(self, step: int, ps: int) -> int:
        """Return the duration of a step that computes prompts and lasts `ps` without noise."""
        return varied(ps, self._ppm, self._begin + step)

    def decode_step_ps(self, step: int, size: int) -> int:
        """Return what the noise adds to each decode step of the run that `step` is in, with `size` sequences."""
        known = self._decode_ps
        while len(known) <= size:
            known.append(self._cost.decode_step_ps(len(known), 0))
        ppm = self._ppm
        return known[size] * ppm[(self._begin + step // self._run) % len(ppm)] // (MILLION * self._root)

    def steps_left(self, step: int) -> int:
        """Return how many decode steps from this one on share its draw."""
        return self._run - step % self._run


def varied(mean: int, ppm: Sequence[int], index: int) -> int:
    """Return the mean with the draw of this index, of a table of draws in millionths that is used in turn."""
    return mean + mean * ppm[index % len(ppm)] // MILLION
