"""The command that makes README's picture."""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, str(ROOT / "docs/picture.py")]


@pytest.mark.nightly
@pytest.mark.skipif(not shutil.which("chromium"), reason="takes a Chromium to draw")
def test_it_draws_the_page_down_to_the_engines(tmp_path: Path) -> None:
    picture = tmp_path / "page.png"
    ran = subprocess.run([*COMMAND, str(picture)], capture_output=True, encoding="utf-8", check=False)
    assert ran.returncode == 0, ran.stderr
    head = picture.read_bytes()[:24]
    width, height = struct.unpack(">II", head[16:])
    assert head[1:4] == b"PNG"
    assert width == 880
    assert 2_000 < height < 3_000


def test_without_a_browser_an_error_is_printed() -> None:
    ran = subprocess.run(COMMAND, env={"PATH": ""}, capture_output=True, encoding="utf-8", check=False)
    assert ran.returncode == 1
    assert ran.stderr.startswith("no picture is made: it takes a browser")
    assert ran.stderr.count("\n") == 1
