"""Runs without the cyclic garbage collector, which finds next to nothing here and takes a twentieth of a run.

States and messages are trees, and are freed by reference counts. A cycle is made of a node and its world: a former
incarnation of an engine is freed by the next collection.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable the garbage collector while the block runs."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
