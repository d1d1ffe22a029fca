"""The shadow state of the invariant checker: prompts at P, requests at D and operations between them.

Nothing here belongs to the state machine: the checker (`invariants.oracle`) fills it from events and effects alone.
"""

from __future__ import annotations

from pdflow.protocol.events import DecodeAdmitted, DecodeQueued, PrefillBegun, PrefillFinished
from pdflow.protocol.ids import Reg, Shards
from pdflow.protocol.values import Allocation


class WatchedPrompt:
    """The state of one finished prompt at P. `reading` counts WRITEs that may still read its blocks."""

    __slots__ = ("allocation", "digest", "failed", "num_tokens", "reading", "released", "sent", "weights", "xid")

    def __init__(self, event: PrefillBegun | PrefillFinished) -> None:
        self.xid = event.xid
        self.allocation = event.allocation
        self.num_tokens = event.num_tokens
        self.digest = event.digest
        self.weights = event.weights
        self.reading = 0
        self.released = False
        self.failed = 0
        """A bit for each P rank of which a WRITE failed."""
        self.sent = 0


class WatchedRequest:
    """The state of one request at D. `landing` counts operations that may still change its blocks."""

    __slots__ = (
        "admitted",
        "allocation",
        "barred",
        "enqueued",
        "expected",
        "landed",
        "landing",
        "num_tokens",
        "over",
        "pairs",
        "prefill",
        "queued",
        "reg",
        "shards",
        "wrong",
    )

    def __init__(self, queued: DecodeQueued) -> None:
        self.queued = queued
        self.prefill = queued.params.prefill.engine
        self.enqueued = False
        self.barred = False
        """Whether this is a placeholder for the target of a grant that a fence has barred."""
        self.admitted: DecodeAdmitted | None = None
        self.allocation: Allocation | None = None
        self.reg: Reg | None = None
        self.num_tokens = 0
        self.shards: tuple[Shards, Shards]
        self.pairs: dict[tuple[int, int], int] = {}
        self.expected = 0
        self.landed = 0
        self.landing = 0
        self.over = False
        self.wrong: tuple[str, str] | None = None
        """An invariant that this request would break if it were committed."""


class WatchedOperation:
    """The state of one WRITE or READ, until it neither reads nor can land."""

    __slots__ = ("bit", "flushing", "handle_final", "landing", "product", "reading", "request")

    def __init__(self, product: WatchedPrompt | None, request: WatchedRequest, bit: int) -> None:
        self.product = product
        self.request = request
        self.bit = bit
        self.reading = True
        self.landing = True
        self.handle_final = False
        self.flushing = False


def mismatch(product: WatchedPrompt, request: WatchedRequest) -> str | None:
    """Return how this source differs from what the request expects, or None."""
    expected = request.admitted
    assert expected is not None
    if product.digest != expected.digest:
        return f"tokens of digest {product.digest:#x} where {expected.digest:#x} are wanted"
    if product.weights != expected.weights:
        return f"KV of weights {product.weights} where {expected.weights} are loaded"
    if product.num_tokens != expected.token_start + expected.num_tokens:
        return f"{product.num_tokens} tokens where {expected.token_start} + {expected.num_tokens} are wanted"
    return None
