"""Pages that run: the fenced blocks of a document, the files that it shows, its commands and what they print.

A block's language says what it is. `sh` is commands, one a line, which run in one folder. `bash` is commands that do
not run, because they need what a test does not have (a GPU, vLLM, a download). A block with `title="NAME"` is a file.
`text` is what the last command before it prints; `...` in it stands for anything, alone on a line for any number of
lines. A command that fails on purpose ends with the comment `# exit code N`.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import attrs
from click.testing import CliRunner

from pdflow.cli import cli

ROOT: Final = Path(__file__).resolve().parents[2]
DOCUMENTS: Final = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/tutorials/*.md"), *ROOT.glob("*/README.md")]
)
_FENCE: Final = re.compile(r"^```(\w*)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FAILS: Final = re.compile(r"# exit code (\d+)$")


@attrs.frozen
class Block:
    """A fenced block: its language, the file that it is (or an empty string) and its text."""

    language: str
    title: str
    text: str


@attrs.frozen
class Printed:
    """What a command printed, and how it ended. Progress goes to stderr, and differs from run to run."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def text(self) -> str:
        return self.stdout or self.stderr


def all_blocks(document: str) -> list[Block]:
    return [Block(*found.groups(default="")) for found in _FENCE.finditer(document)]


def blocks(document: str, language: str) -> list[str]:
    """The texts of one language's blocks that are no files."""
    return [block.text for block in all_blocks(document) if block.language == language and not block.title]


def commands(document: str, program: str = "") -> list[str]:
    """The commands of a document's `sh` blocks that begin with this word."""
    lines = (line for block in blocks(document, "sh") for line in commands_of(block))
    return [line for line in lines if line.startswith(program)]


def commands_of(block: str) -> list[str]:
    """The commands of a block; a backslash at the end of a line goes on in the next."""
    return [line for line in re.sub(r" *\\\n *", " ", block).splitlines() if line.strip()]


def run_pdflow(arguments: list[str]) -> Printed:
    """Run the command in this process, in the current folder."""
    ran = CliRunner().invoke(cli, arguments, prog_name="pdflow")
    return Printed(ran.exit_code, ran.stdout, ran.stderr)


def run_python(code: str, folder: Path) -> str:
    ran = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, encoding="utf-8", check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def run_command(command: str) -> Printed:
    """Run one line of a `sh` block in the current folder: pdflow in this process, `python` as this interpreter."""
    words = shlex.split(os.path.expandvars(command), comments=True)
    if words[0] == "pdflow":
        return run_pdflow(words[1:])
    if words[0] == "python":
        words[0] = sys.executable
    ran = subprocess.run(words, capture_output=True, encoding="utf-8", check=False)
    return Printed(ran.returncode, ran.stdout, ran.stderr)


def matches(shown: str, printed: str) -> bool:
    """Whether a text is what was printed; `...` in it stands for anything. Spaces at the ends of lines do not count."""
    pieces = re.split(r"(^\.\.\.$\n?|\.\.\.)", _stripped(shown), flags=re.MULTILINE)
    pattern = "".join(_piece(piece) for piece in pieces)
    return re.fullmatch(pattern, _stripped(printed), re.DOTALL) is not None


def _stripped(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines()) + "\n"


def _piece(piece: str) -> str:
    if piece == "...":
        return r"[^\n]*?"
    return r"(?:[^\n]*\n)*?" if piece == "...\n" else re.escape(piece)


def run_page(document: str) -> Iterator[tuple[str, Printed]]:
    """Write a page's files and run its commands, in order, in the current folder. Yields each command as it has run.

    Raises AssertionError where a command ends otherwise than its page says, or prints something else."""
    printed: Printed | None = None
    for block in all_blocks(document):
        if block.title:
            file = Path(block.title)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text, encoding="utf-8")
        elif block.language == "sh":
            for command in commands_of(block.text):
                printed = run_command(command)
                fails = _FAILS.search(command)
                assert printed.exit_code == (int(fails[1]) if fails else 0), (command, printed)
                yield command, printed
        elif block.language == "text":
            assert printed is not None, f"no command before {block.text}"
            assert matches(block.text, printed.text), f"shown:\n{block.text}\nprinted:\n{printed.text}"
