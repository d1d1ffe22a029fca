"""The command `pdflow`: one function per subcommand, no logic.

Each opens what it needs when it is called, so that `--help` is quick and `sim/` is imported by `simulate` alone. Bad
input goes to stderr, one problem a line, with exit code 2 (`pdflow.errors` lists the codes).
"""

from __future__ import annotations

import codecs
import errno
import io
import os
import sys
from typing import Any

import click

from pdflow.cli.checking import check, validate
from pdflow.cli.explaining import explain
from pdflow.cli.listings import methods, presets, schema
from pdflow.cli.planning import plan
from pdflow.cli.runs import calibrate, compare, simulate
from pdflow.cli.serving import bench, serve, top
from pdflow.cli.sweeping import sweep
from pdflow.cli.traces import trace
from pdflow.errors import EXIT_BAD_INPUT, EXIT_INTERRUPTED, PdflowError
from pdflow.version import compiled, version


class _Front(click.Group):
    """Errors meant for people become lines on stderr and an exit code, for every subcommand alike."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except PdflowError as error:
            click.echo(str(error), err=True)
            ctx.exit(error.exit_code)
        except KeyboardInterrupt as interrupt:
            click.echo(f"interrupted: {interrupt}" if interrupt.args else "interrupted", err=True)
            ctx.exit(EXIT_INTERRUPTED)


@click.group(cls=_Front, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80})
@click.version_option(version() + (" (compiled)" if compiled() else ""), prog_name="pdflow")
def cli() -> None:
    """Simulate, check and serve prefill/decode-disaggregated LLM serving with one transfer protocol.

    Exit codes: 0 success; 1 the check failed (a violated invariant, an error, a missed target); 2 bad input or a
    missing optional package; 3 a time or memory limit was reached first; 130 interrupted.
    """


for _command in (
    *(simulate, explain, plan, sweep, compare, calibrate),
    *(serve, top, bench),
    *(check, validate, trace),
    *(schema, methods, presets),
):
    cli.add_command(_command)


def main() -> None:
    """The command `pdflow`."""
    _print_whatever_the_encoding()
    try:
        cli.main(prog_name="pdflow")
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except OSError as cause:  # of files it is said where they are written: what is full here is behind stdout
        if cause.errno != errno.ENOSPC:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the last flush, at the interpreter's end
        click.echo(f"standard output: cannot write: {cause.strerror}; free space at its destination", err=True)
        sys.exit(EXIT_BAD_INPUT)


def _print_whatever_the_encoding() -> None:
    """Print `?` where the encoding of stdout or stderr lacks a character. In the C locale without UTF-8 mode it is
    ASCII, and a table with a `±` would end the command with a traceback."""
    codecs.register_error("pdflow", _lacking)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="pdflow")


def _lacking(error: UnicodeError) -> tuple[bytes, int]:
    """Return what is printed for the characters that cannot be encoded: of a file's name its own bytes, else `?`."""
    assert isinstance(error, UnicodeEncodeError)
    printed = [
        bytes([ord(char) & 0xFF]) if "\udc80" <= char <= "\udcff" else b"?"
        for char in error.object[error.start : error.end]
    ]
    return b"".join(printed), error.end
