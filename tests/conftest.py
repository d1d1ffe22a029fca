"""Hypothesis profiles: HYPOTHESIS_PROFILE is `dev` (the default), `ci`, `again` or `nightly`.

No profile has a deadline: it would measure how busy the machine is. `ci` draws the same examples every time, so that a
change is judged by what it changed; `again` a fifth of them, for code that is the same but compiled; `nightly` searches
longer, and anew each night.
"""

from __future__ import annotations

import gc
import os

from hypothesis import settings

settings.register_profile("dev", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("again", deadline=None, derandomize=True, print_blob=True, max_examples=20)
settings.register_profile("nightly", deadline=None, max_examples=2_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


def pytest_collection_finish() -> None:
    """What has been imported and collected lives as long as the process: no search for cycles goes through it again."""
    gc.collect()
    gc.freeze()
