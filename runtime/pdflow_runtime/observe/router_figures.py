"""The router's figures for `pdflow top`: sums since its start, and rates and latencies between two readings of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

import msgspec

from pdflow.protocol.values import S

FINEST_S: Final = 0.001
STEP: Final = 1.1
FIRST_TOKEN_NS: Final = tuple(int(FINEST_S * STEP**number * S) for number in range(140))
"""Upper bounds of the times that are counted together, each 10 % above the one before: up to 9 minutes."""


class RouterFigures(msgspec.Struct, frozen=True):
    """Sums since the router's start."""

    at_ns: int
    """The router's monotonic time."""
    cpu_ns: int
    requests: int
    """Requests that have ended."""
    failed: int
    """Of these."""
    tokens: int
    """Generated tokens that clients got."""
    first_tokens: list[int]
    """Times to first token, by FIRST_TOKEN_NS, and those beyond."""


class Rates(msgspec.Struct, frozen=True):
    """What happened between two readings. Latencies are None if no answer began."""

    requests_per_s: float
    failed_per_s: float
    tokens_per_s: float
    cpu: float
    """Share of a core."""
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None


def first_token_bucket(lasted_ns: int) -> int:
    return bisect_left(FIRST_TOKEN_NS, lasted_ns)


def rates(before: RouterFigures, after: RouterFigures) -> Rates | None:
    """Return the rates between two readings; None if the router was restarted meanwhile."""
    lasted_s = (after.at_ns - before.at_ns) / S
    if lasted_s <= 0 or after.requests < before.requests or after.cpu_ns < before.cpu_ns:
        return None
    counts = [now - then for then, now in zip(before.first_tokens, after.first_tokens, strict=True)]
    return Rates(
        requests_per_s=(after.requests - before.requests) / lasted_s,
        failed_per_s=(after.failed - before.failed) / lasted_s,
        tokens_per_s=(after.tokens - before.tokens) / lasted_s,
        cpu=(after.cpu_ns - before.cpu_ns) / S / lasted_s,
        ttft_p50_ms=quantile_ms(counts, 0.5),
        ttft_p95_ms=quantile_ms(counts, 0.95),
    )


def quantile_ms(counts: Sequence[int], q: float) -> float | None:
    """Return the upper bound of the bucket that the quantile is in."""
    rank, seen = q * sum(counts), 0
    for number, count in enumerate(counts):
        seen += count
        if count and seen >= rank:
            return FIRST_TOKEN_NS[min(number, len(FIRST_TOKEN_NS) - 1)] / 1e6
    return None
