"""How many sequences decode in a step, on average.

An engine that decodes is in a step for as long as it has one sequence, so its time in steps says little about its load.
The size of its batches does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pdflow.results.steps import Steps
from pdflow.results.totals import EngineTotals


def mean_batch(steps: Mapping[str, Steps], engines: Sequence[EngineTotals]) -> float | None:
    """Return the mean number of sequences that wait for a token after their first, over all steps of these engines.

    None if no step of theirs was logged: engines that only prefill have no log.
    """
    counts = [steps[engine.name].totals() for engine in engines if engine.name in steps]
    number = sum(count for count, _ in counts)
    return sum(sequences for _, sequences in counts) / number if number else None
