"""A value that is read again when its files change."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdflow.errors import PdflowError
from pdflow_runtime.security.reloaded import EVERY_NS, Reloaded


def test_a_failure_that_passes_is_logged_once_and_the_file_is_read_after_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now, fails, path = 0, False, tmp_path / "keys"

    def read() -> str:
        if fails:
            raise PdflowError("Too many open files")
        return path.read_text()

    path.write_text("old")
    value = Reloaded("keys", [path], read, lambda: now)
    path.write_text("the new ones")
    fails = True
    for _ in range(3):
        now += EVERY_NS
        assert value.current() == "old"
    assert caplog.text.count("Too many open files") == 1
    fails = False
    assert value.current() == "old", "a read is tried at most once a second"
    now += EVERY_NS
    assert value.current() == "the new ones"
