"""What several commands share: --set, --out, tables on stdout, and how a module of an extra is imported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from pdflow.cli.completion import complete_override
from pdflow.errors import MissingBackendError

SET = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    shell_complete=complete_override,
    help="Replace one value of the scenario, for example pool.decode.tp=2. Repeatable.",
)


def as_utf8(value: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
    """Return an option that is sent or written as UTF-8. In the C locale an argument that is not ASCII arrives as
    surrogates for its bytes, which no JSON can have."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return None if value is None else tuple(str(as_utf8(each)) for each in value)


def need_out(out: str | Path | None, flags: Mapping[str, bool]) -> None:
    """What writes into --out DIR needs one."""
    for flag in ("events", "save_detailed", "timeline", "html"):
        if flags.get(flag) and out is None:
            raise click.UsageError(f"--{flag.replace('_', '-')} needs --out DIR")


def client(opened: Callable[[], Any]) -> Any:
    """Return a module that the extra `client` brings what it imports for. MissingBackendError."""
    return _of_extra("client", opened)


def live(opened: Callable[[], Any]) -> Any:
    """Return a module that the extra `live` brings what it imports for. MissingBackendError."""
    return _of_extra("live", opened)


def _of_extra(extra: str, opened: Callable[[], Any]) -> Any:
    try:
        return opened()
    except ModuleNotFoundError as missing:
        raise MissingBackendError(f"this needs {missing.name}: pip install 'pdflow[{extra}]'") from None


def print_view(view: Any) -> None:
    from rich.console import Console

    Console(highlight=False, markup=False, emoji=False).print(view)
