"""Python's garbage collector in a process that answers many requests: the router's.

A request makes some hundred objects, nearly all of which are freed by reference counting. By default the collector runs
after 700 new ones, and looks at all older objects now and then, those of imported modules included.
"""

from __future__ import annotations

import gc
from typing import Final

YOUNG: Final = 10_000
"""New objects after which the collector runs: those of some 20 requests, a few megabytes."""


def collect_rarely() -> None:
    """Leave out of every collection what is there now, and collect less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, *gc.get_threshold()[1:])
