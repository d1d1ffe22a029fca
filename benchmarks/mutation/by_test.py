"""A plugin of pytest, under `coverage run`: coverage by test, and how long each takes.

Coverage's own contexts name the function that runs, which in Hypothesis's tests is one of Hypothesis.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from coverage import Coverage

SECONDS_FILE = "PDFLOW_TEST_SECONDS"
"""The variable of the environment that names the file for the seconds of each test."""
_seconds: dict[str, float] = {}


def pytest_runtest_setup(item: pytest.Item) -> None:
    running = Coverage.current()
    assert running is not None, "pytest does not run under coverage"
    running.switch_context(item.nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[report.nodeid] = _seconds.get(report.nodeid, 0.0) + report.duration


def pytest_sessionfinish() -> None:
    Path(os.environ[SECONDS_FILE]).write_text(json.dumps(_seconds))
