"""The command that made a result, as one line that a shell runs again."""

from __future__ import annotations

import shlex
from collections.abc import Sequence


def command_line(arguments: Sequence[str]) -> str:
    """Return the line of `pdflow` with these arguments.

    Results are UTF-8 files. In the C locale an argument that is not ASCII arrives as surrogates for its bytes, which
    are read as UTF-8 here; bytes that are not UTF-8 become escapes.
    """
    decoded = [
        argument.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace") for argument in arguments
    ]
    return shlex.join(["pdflow", *decoded])
