"""Every command and option in a comment of examples/ runs: a reader copies it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click
import pytest
from click.testing import CliRunner

from pdflow.cli import cli

ROOT: Final = Path(__file__).resolve().parents[2]
FILES: Final = sorted((ROOT / "examples").rglob("*.toml"))
FEW: Final = ("--set", "workload.requests=20")
NEEDS_A_TRACE: Final = ("mooncake-conversation.toml",)
"""Its trace is not ours to distribute."""

_VALUE = r"[^\s`();,]*[^\s`();,.:]"
_OVERRIDE = rf"[a-z_]+(?:\.[a-z_]+)+={_VALUE}"
_OPTION = rf"--set {_OVERRIDE}|--seed \d+|--check-invariants|--exact"
_OPTIONS = re.compile(rf"(?:{_OPTION})(?: (?:{_OPTION}))*")
_ALONE = re.compile(rf"(?<!--set )(?<![\w.=])({_OVERRIDE})")
_COMMAND = re.compile(r"`(pdflow [a-z]+ [^`]+)`|^ {4}(pdflow .+)$", re.MULTILINE)


def comments(text: str) -> str:
    """The comments of a file, blocks as single lines."""
    blocks, block = [], []
    for line in [*text.splitlines(), ""]:
        if line.startswith("#"):
            block.append(line.removeprefix("#").strip())
        elif block:
            blocks.append(" ".join(block))
            block = []
        if not line.startswith("#") and "  #" in line:
            blocks.append(line.partition("  #")[2].strip())
    return "\n".join(blocks)


def commands(path: Path) -> Iterator[list[str]]:
    """The commands that the comments of an example give: whole ones, options of `simulate`, and values to set."""
    text = comments(path.read_text(encoding="utf-8"))
    own = path.relative_to(ROOT).as_posix()
    for match in _COMMAND.finditer(text):
        yield shlex.split(match[1] or match[2])[1:]
    text = _COMMAND.sub("", text)
    for match in _OPTIONS.finditer(text):
        yield ["simulate", own, *shlex.split(match[0])]
    for match in _ALONE.finditer(text):
        yield ["simulate", own, "--set", match[1]]


ALL: Final = [
    pytest.param(path, command, id=shlex.join(command).replace("examples/", ""))
    for path in FILES
    for command in commands(path)
]


def test_commands_are_found() -> None:
    found = [shlex.join(parameter.values[1]) for parameter in ALL]
    assert "serve examples/serve-quickstart.toml" in found
    assert any("methods/cpu-staged.toml --set transfer.host_buffer_bytes=" in command for command in found)
    assert any(command.count("--set") == 2 for command in found)
    assert len(found) >= 15


@pytest.mark.parametrize(("path", "command"), ALL)
def test_it_runs(path: Path, command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    if path.name in NEEDS_A_TRACE:
        pytest.skip("needs a trace that is not ours to distribute")
    name, *arguments = command
    subcommand = cli.commands[name]
    if name not in ("simulate", "validate"):
        subcommand.make_context(name, arguments)  # raises UsageError for an option that does not exist
        return
    result = CliRunner().invoke(cli, [name, *arguments, *FEW], prog_name="pdflow")
    broken = "--check-invariants" in arguments and result.exit_code == 1
    assert result.exit_code == 0 or broken, result.output


def test_options_of_other_commands_are_parsed() -> None:
    with pytest.raises(click.UsageError):
        cli.commands["serve"].make_context("serve", ["examples/serve-quickstart.toml", "--absent"])
