"""The router's garbage collector leaves out what was there at the start, and still finds cycles."""

from __future__ import annotations

import gc

from pdflow_runtime.process.collector import YOUNG, collect_rarely


def test_what_is_there_is_frozen_and_the_collector_stays_on() -> None:
    before = gc.get_threshold()
    try:
        collect_rarely()
        assert gc.get_freeze_count() > 0
        assert gc.isenabled()
        assert gc.get_threshold() == (YOUNG, *before[1:])
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
