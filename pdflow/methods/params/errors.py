"""The one error of this package: which field, what is wrong with it, what to send instead."""

from __future__ import annotations

from collections.abc import Mapping

from pdflow.errors import EXIT_BAD_INPUT, PdflowError
from pdflow.protocol.wire.limits import MAX_U64

MAX_SHOWN_CHARS = 60


class ParamsError(PdflowError):
    """A value of a request, or of a configuration file, is not what its method needs.

    Of a request: answer that request with this text (400), and go on. Parts of the text are the sender's own words, cut
    and made printable.
    """

    exit_code = EXIT_BAD_INPUT

    def __init__(self, field: str, wrong: str, expected: str) -> None:
        self.field = field
        self.wrong = wrong
        self.expected = expected
        super().__init__(f"{field} {wrong}, expected {expected}")

    def under(self, location: str) -> ParamsError:
        """Return the same error, as seen from outside the object `location`."""
        return ParamsError(f"{location}.{self.field}", self.wrong, self.expected)


def shown(value: object) -> str:
    """Return a value as its author wrote it, short and safe to log; of what holds other values, only its kind."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        # Beyond 4,300 digits str() of an int is an error, and long before that no help.
        return str(value) if abs(value) <= MAX_U64 else f"an integer of {value.bit_length()} bits"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, (list, tuple)):
        return "an array"
    return "an object" if isinstance(value, Mapping) else f"a {type(value).__name__}"


def quoted(text: str) -> str:
    short = text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 3] + "..."
    return '"' + "".join(c if c.isprintable() else "?" for c in short) + '"'
