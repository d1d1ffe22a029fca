"""HOST:PORT, as all five systems write it: in ids, in urls and in files."""

from __future__ import annotations

from pdflow.methods.params.errors import quoted
from pdflow.protocol.wire.limits import MAX_NAME_BYTES


class AddressError(ValueError):
    """A text is no HOST:PORT, for the reason in the message."""


def split_address(text: str) -> tuple[str, int]:
    """Return host and port of "HOST:PORT". The last colon separates them, so that a bracketed IPv6 address is a
    host."""
    host, _, digits = text.rpartition(":")
    if not 1 <= len(host) <= MAX_NAME_BYTES or any(not c.isprintable() or c.isspace() or c == "/" for c in host):
        raise AddressError("it is not HOST:PORT")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise AddressError("an IPv6 address needs brackets, [ADDRESS]:PORT")
    # Length first: int() of a long text is slow, and beyond 4,300 digits an error.
    if not (1 <= len(digits) <= 5 and digits.isascii() and digits.isdigit()) or not 1 <= int(digits) <= 65_535:
        raise AddressError(f"the port is {quoted(digits)}, not 1 to 65,535")
    return host, int(digits)
