"""The schema of [[fault]] and [faults]: one attrs class per kind, one field per key.

Engines and links are meant by name, with `*` for any part of one: "prefill-0", "decode-*". What the keys of one fault
must be to each other, and whether its names mean anything, is `validation/faults.py`; with names and times worked out
it becomes a plan of `pdflow.faults` in `plan.py`.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import attrs
from attrs import field

from pdflow.scenario.schema.fields import DELAY, NOT_EMPTY, NOT_NEGATIVE, SCALE, TIMER, Bound, field_doc

SHARE = Bound(above=0, at_most=1)
RATE = Bound(above=0, at_most=1e6)
FACTOR = Bound(above=1, at_most=1e9)
PROBABILITY = "of each message, operation or handshake; with at_s or rate_per_s, 1 if absent"

Frame: TypeAlias = Literal[
    "REG", "REG_ACK", "DONE", "FAIL", "CANCEL", "CANCEL_ACK", "RELEASE", "TAKEN", "SYNC", "SYNC_REPLY", "COMPLETION",
    "HB",
]  # fmt: skip
"""Frames by their tags on the wire (spec 3.1): strict's, and vLLM's completions and heartbeats."""


@attrs.frozen(kw_only=True)
class Timed:
    """The times at which a fault acts: once, periodically, or at random."""

    at_s: float | None = field(default=None, metadata=field_doc("when it begins", DELAY))
    for_s: float | None = field(default=None, metadata=field_doc("how long it lasts; for good if absent", TIMER))
    every_s: float | None = field(default=None, metadata=field_doc("begins again this long after it last began", TIMER))
    rate_per_s: float | None = field(
        default=None,
        metadata=field_doc(
            "begins at random times, so many a second on average while it does not act; for each engine, if it has one",
            RATE,
        ),
    )


@attrs.frozen(kw_only=True)
class OnLinks(Timed):
    """The engines between which a fault acts; all, if none are given."""

    between: tuple[str, ...] | None = field(
        default=None, metadata=field_doc("two engines, `*` for any part of a name: both directions between them")
    )
    from_engine: str | None = field(
        default=None, metadata=field_doc("instead of between: only what this engine sends", NOT_EMPTY, key="from")
    )
    to_engine: str | None = field(
        default=None,
        metadata=field_doc(
            "instead of between: only what this engine is sent; of drop and partition also router: its heartbeats",
            NOT_EMPTY,
            key="to",
        ),
    )


@attrs.frozen(kw_only=True)
class OnMessages(OnLinks):
    probability: float | None = field(default=None, metadata=field_doc(PROBABILITY, SHARE))
    messages: tuple[Frame, ...] | None = field(
        default=None, metadata=field_doc("only these frames, by their tags on the wire; all if absent")
    )


@attrs.frozen(kw_only=True)
class DropFault(OnMessages):
    """Messages are lost; of a WRITE's or READ's notification only that, not the data."""


@attrs.frozen(kw_only=True)
class DelayFault(OnMessages):
    """Messages come later, also behind those that were sent after them."""

    delay_s: float = field(metadata=field_doc("how much later", DELAY))
    jitter_s: float = field(default=0.0, metadata=field_doc("and up to so much more, drawn for each", DELAY))


@attrs.frozen(kw_only=True)
class DuplicateFault(OnMessages):
    """Messages come twice."""

    delay_s: float = field(default=0.0, metadata=field_doc("how long after the first the second comes", DELAY))


@attrs.frozen(kw_only=True)
class ReorderFault(OnMessages):
    """Messages are held back until the next one between the same two ranks has overtaken them."""

    delay_s: float = field(default=1.0, metadata=field_doc("for how long at most", DELAY))


@attrs.frozen(kw_only=True)
class PartitionFault(OnLinks):
    """No message, handshake or byte passes. With from or to it is asymmetric."""


@attrs.frozen(kw_only=True)
class SlowFault(Timed):
    """Bandwidth is divided; flows that are under way slow down too."""

    engine: str | None = field(default=None, metadata=field_doc("the NICs of this engine", NOT_EMPTY))
    link: str | None = field(default=None, metadata=field_doc("instead of engine: one of network.links", NOT_EMPTY))
    factor: float = field(metadata=field_doc("what bandwidth is divided by", FACTOR))


@attrs.frozen(kw_only=True)
class NicDownFault(Timed):
    """A NIC of each of an engine's GPUs fails; what it had under way is tried again over those that are left."""

    engine: str = field(metadata=field_doc("which one, `*` for any part of its name", NOT_EMPTY))
    nic: int = field(default=0, metadata=field_doc("the NIC's number, below network.nics_per_rank", NOT_NEGATIVE))


@attrs.frozen(kw_only=True)
class CrashFault(Timed):
    """All processes of an engine die: queue, KV cache and what it knew of its peers are gone."""

    engine: str = field(metadata=field_doc("which one, `*` for any part of its name", NOT_EMPTY))
    restart_after_s: float | None = field(
        default=None,
        metadata=field_doc("it is up again, empty, so long after; never, if absent (but see heal_s)", DELAY),
    )
    engine_id: Literal["same", "new"] = field(
        default="same", metadata=field_doc("whether it comes back under the id that its peers know")
    )
    incarnation: Literal["new", "same"] = field(
        default="new", metadata=field_doc("vllm-compat: same, if nothing in its handshake shows that it was restarted")
    )
    in_flight: Literal["lands", "cut"] = field(
        default="lands", metadata=field_doc("what becomes of a WRITE that its NIC has begun")
    )


@attrs.frozen(kw_only=True)
class PauseFault(Timed):
    """An engine stands still (descheduled, garbage collection, a long step) and then goes on as if nothing had been."""

    engine: str = field(metadata=field_doc("which one, `*` for any part of its name", NOT_EMPTY))
    scope: Literal["process", "step"] = field(
        default="process",
        metadata=field_doc(
            "process: nothing is heard or done, only its NICs go on; step: only its running step is longer"
        ),
    )


@attrs.frozen(kw_only=True)
class SkewFault(Timed):
    """An engine's clock is wrong. Its steps are not: they take what they take."""

    engine: str = field(metadata=field_doc("which one, `*` for any part of its name", NOT_EMPTY))
    speed: float = field(default=1.0, metadata=field_doc("how fast it runs: 1.1 gains 0.1 s a second", SCALE))
    offset_s: float = field(default=0.0, metadata=field_doc("it jumps ahead by so much as the fault begins", DELAY))


@attrs.frozen(kw_only=True)
class TransferErrorFault(OnLinks):
    """A WRITE or READ ends with an error."""

    probability: float | None = field(default=None, metadata=field_doc(PROBABILITY, SHARE))
    stage: Literal["start", "in-flight", "landed"] = field(
        default="in-flight",
        metadata=field_doc(
            "before a byte moved, halfway, or when all bytes and the notification had arrived after all"
        ),
    )


@attrs.frozen(kw_only=True)
class HandshakeErrorFault(OnLinks):
    """A handshake fails."""

    probability: float | None = field(default=None, metadata=field_doc(PROBABILITY, SHARE))
    delay_s: float | None = field(
        default=None, metadata=field_doc("how long it hangs before it fails; network.handshake_s if absent", DELAY)
    )


@attrs.frozen(kw_only=True)
class HangUpFault(Timed):
    """Clients go away: many at once, or each request's after a while."""

    probability: float | None = field(
        default=None,
        metadata=field_doc("of each request: of those open at that time, or that come; 1 if absent", SHARE),
    )
    within_s: float | None = field(
        default=None,
        metadata=field_doc("each request's client goes at a time of its own, up to so long after it came", TIMER),
    )


Fault: TypeAlias = (
    DropFault
    | DelayFault
    | DuplicateFault
    | ReorderFault
    | PartitionFault
    | SlowFault
    | NicDownFault
    | CrashFault
    | PauseFault
    | SkewFault
    | TransferErrorFault
    | HandshakeErrorFault
    | HangUpFault
)

FAULT_KINDS: dict[str, type] = {
    "drop": DropFault,
    "delay": DelayFault,
    "duplicate": DuplicateFault,
    "reorder": ReorderFault,
    "partition": PartitionFault,
    "slow": SlowFault,
    "nic-down": NicDownFault,
    "crash": CrashFault,
    "pause": PauseFault,
    "skew": SkewFault,
    "transfer-error": TransferErrorFault,
    "handshake-error": HandshakeErrorFault,
    "hang-up": HangUpFault,
}


@attrs.frozen(kw_only=True)
class Faults:
    """[faults]: settings of all faults of the run."""

    heal_s: float | None = field(
        default=None,
        metadata=field_doc(
            "from then on no fault acts and every engine is up: whatever is open must end within a bounded time", DELAY
        ),
    )
    transport_timeout_s: float = field(
        default=7.0,
        metadata=field_doc(
            "a WRITE or READ whose peer does not answer fails after it (UCX: UCX_RC_TIMEOUT 1 s, 7 retries)", TIMER
        ),
    )
