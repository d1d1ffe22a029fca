"""The requests of a run: arrivals, lengths and prefixes, synthetic, from a trace, or like one.

`build.requests` turns a [workload] table into requests; `readers` opens the files.
"""

from pdflow.scenario.schema import scenario as schema  # noqa: F401 (first: loading a scenario reads its trace, and a trace is read as its schema says)
from pdflow.workload.request import PREFIX_BLOCK_TOKENS, WHEN_ONE_ENDS, Request
from pdflow.workload.rng import Rng, Stream

__all__ = ["PREFIX_BLOCK_TOKENS", "WHEN_ONE_ENDS", "Request", "Rng", "Stream"]
