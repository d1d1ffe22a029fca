"""The engine's own scheduler: continuous batching, chunked prefill, paged admission, preemption."""

from pdflow.engine.engine import Engine
from pdflow.engine.log import StepLog
from pdflow.engine.sequence import (
    Admitted,
    Dropped,
    Finished,
    Limits,
    NeverFitsError,
    Outcome,
    Phase,
    Prefilled,
    Sequence,
)

__all__ = [
    "Admitted",
    "Dropped",
    "Engine",
    "Finished",
    "Limits",
    "NeverFitsError",
    "Outcome",
    "Phase",
    "Prefilled",
    "Sequence",
    "StepLog",
]
