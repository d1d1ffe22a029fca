"""The stages that an engine has measured of a request, which it sends to the router with its answer: the header
`server-timing` (W3C Server Timing). Clients do not get it."""

from __future__ import annotations

import re
from typing import Final

from pdflow_runtime.http.messages import Headers, first

SERVER_TIMING: Final = b"server-timing"
NS_PER_MS: Final = 1_000_000
_stage: Final = re.compile(rb"([a-z_]{1,32});dur=([0-9]{1,9}(?:\.[0-9]{1,6})?)")


def server_timing(stages_ns: dict[str, int]) -> Headers:
    """Return the header that says how long each stage took; none without stages."""
    stages = (b"%b;dur=%.3f" % (stage.encode(), lasted_ns / NS_PER_MS) for stage, lasted_ns in stages_ns.items())
    return ((SERVER_TIMING, b", ".join(stages)),) if stages_ns else ()


def stages_of(headers: Headers) -> dict[str, float]:
    """Return the stages that a header names, with their milliseconds."""
    value = first(headers, SERVER_TIMING)
    return {} if value is None else {stage.decode(): float(ms) for stage, ms in _stage.findall(value)}
