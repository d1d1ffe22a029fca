"""Hypothesis profiles: HYPOTHESIS_PROFILE is `dev` (the default), `ci`, `again` or `nightly`.

No profile has a deadline: it would measure how busy the machine is. `ci` draws the same examples every time, so that a
change is judged by what it changed; `again` a fifth of them, for code that is the same but compiled; `nightly` searches
longer, and anew each night.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Final

import pytest
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


GPU_FOLDERS: Final = ("runtime/gpu", "runtime/transports")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m gpu` or `-m gpu2`, only the folders that have such tests: a machine with a GPU may lack what others
    import."""
    if config.getoption("markexpr") not in ("gpu", "gpu2") or collection_path.suffix != ".py":
        return None
    within = collection_path.relative_to(Path(__file__).parent).as_posix()
    return None if within.startswith(GPU_FOLDERS) else True
