"""Commands in the C locale, where Python prints ASCII: they end as elsewhere, and files are UTF-8."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def in_c_locale(*args: str) -> subprocess.CompletedProcess[bytes]:
    """The command, where opening a file in the locale's encoding is an error."""
    strict = ("-X", "warn_default_encoding", "-W", "error::EncodingWarning")
    return subprocess.run(
        [sys.executable, *strict, "-m", "pdflow", *args],
        capture_output=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONIOENCODING": ""},
        check=False,
    )


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    """A scenario whose name, folder and comments are not ASCII."""
    text = (ROOT / "examples/md1.toml").read_text(encoding="utf-8")
    file = tmp_path / "größe/модель.toml"
    file.parent.mkdir()
    file.write_text("# ± 模型\n" + text.replace('name = "md1"\n', ""), encoding="utf-8")
    return file


@pytest.mark.slow
@pytest.mark.parametrize(
    "args",
    [
        ("validate", "examples/conversation.toml"),
        ("validate", "examples/serve-quickstart.toml"),
        ("check", "--diagram", "R13"),
        ("methods",),
        ("methods", "nixl-push"),
        ("presets",),
        ("presets", "h100-sxm", "llama-3.1-8b"),
        ("schema",),
        ("--help",),
    ],
    ids=" ".join,
)
def test_a_command_prints_what_the_encoding_has(args: tuple[str, ...]) -> None:
    result = in_c_locale(*args)
    assert (result.returncode, result.stderr) == (0, b"")
    assert result.stdout.isascii()


@pytest.mark.slow
def test_files_are_utf_8_and_names_keep_their_bytes(scenario: Path) -> None:
    out = scenario.parent / "out"
    files = ("--out", str(out), "--events", "--timeline", "--html", "--save-detailed")
    result = in_c_locale("simulate", str(scenario), "--set", "workload.requests=20", *files)
    assert result.returncode == 0, result.stderr
    assert os.fsencode(out) in result.stderr
    assert str(scenario) in (out / "results.json").read_text(encoding="utf-8")
    assert "модель" in (out / "report.html").read_text(encoding="utf-8")
    for args in (("compare", str(out), str(scenario)), ("check", str(scenario), "--trace", str(out / "events.jsonl"))):
        again = in_c_locale(*args)
        assert (again.returncode, b"Traceback" in again.stderr) == (0, False), again.stderr


@pytest.mark.slow
def test_a_missing_file_is_one_line(scenario: Path) -> None:
    for args in (("simulate", "größe.toml"), ("trace", "describe", "größe.csv"), ("presets", "größe")):
        result = in_c_locale(*args)
        assert result.returncode == 2
        assert result.stderr.count(b"\n") == 1, result.stderr
