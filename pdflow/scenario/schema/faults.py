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
PROBABILITY = "probability for each message, operation or handshake; default with at_s or rate_per_s: 1"

Frame: TypeAlias = Literal[
    "REG", "REG_ACK", "DONE", "FAIL", "CANCEL", "CANCEL_ACK", "RELEASE", "TAKEN", "SYNC", "SYNC_REPLY", "COMPLETION",
    "HB",
]  # fmt: skip
"""Frames by their tags on the wire (spec 3.1): strict's, and vLLM's completions and heartbeats."""


@attrs.frozen(kw_only=True)
class Timed:
    """The times at which a fault acts: once, periodically, or at random."""

    at_s: float | None = field(default=None, metadata=field_doc("time at which the fault begins", DELAY))
    for_s: float | None = field(
        default=None, metadata=field_doc("duration of the fault; default: until the end of the run", TIMER)
    )
    every_s: float | None = field(
        default=None, metadata=field_doc("period: the fault begins again this long after its last beginning", TIMER)
    )
    rate_per_s: float | None = field(
        default=None,
        metadata=field_doc(
            "the fault begins at random times: mean number per second while it does not act; separately for "
            "each matching engine",
            RATE,
        ),
    )


@attrs.frozen(kw_only=True)
class OnLinks(Timed):
    """The engines between which a fault acts; all, if none are given."""

    between: tuple[str, ...] | None = field(
        default=None, metadata=field_doc("two engines, both directions; `*` matches any part of a name")
    )
    from_engine: str | None = field(
        default=None,
        metadata=field_doc("instead of between: messages and transfers from this engine only", NOT_EMPTY, key="from"),
    )
    to_engine: str | None = field(
        default=None,
        metadata=field_doc(
            "instead of between: messages and transfers to this engine only; with drop and partition also "
            "router, for heartbeats",
            NOT_EMPTY,
            key="to",
        ),
    )


@attrs.frozen(kw_only=True)
class OnMessages(OnLinks):
    probability: float | None = field(default=None, metadata=field_doc(PROBABILITY, SHARE))
    messages: tuple[Frame, ...] | None = field(
        default=None, metadata=field_doc("affect only frames with these wire tags; default: all")
    )


@attrs.frozen(kw_only=True)
class DropFault(OnMessages):
    """Messages are lost. If the message is the notification of a WRITE or READ, its data still arrive."""


@attrs.frozen(kw_only=True)
class DelayFault(OnMessages):
    """Messages arrive late, possibly after messages that were sent later."""

    delay_s: float = field(metadata=field_doc("delay of each message", DELAY))
    jitter_s: float = field(
        default=0.0, metadata=field_doc("additional random delay of each message, up to this", DELAY)
    )


@attrs.frozen(kw_only=True)
class DuplicateFault(OnMessages):
    """Messages arrive twice."""

    delay_s: float = field(default=0.0, metadata=field_doc("time from the first copy to the second", DELAY))


@attrs.frozen(kw_only=True)
class ReorderFault(OnMessages):
    """A message is held until the next one between the same two ranks has overtaken it."""

    delay_s: float = field(default=1.0, metadata=field_doc("longest time for which a message is held", DELAY))


@attrs.frozen(kw_only=True)
class PartitionFault(OnLinks):
    """No message, handshake or data pass. With from or to, only one direction is cut."""


@attrs.frozen(kw_only=True)
class SlowFault(Timed):
    """Bandwidth is divided by factor, also for transfers in flight."""

    engine: str | None = field(
        default=None, metadata=field_doc("the engine whose NICs are slow; `*` matches any part of a name", NOT_EMPTY)
    )
    link: str | None = field(
        default=None, metadata=field_doc("instead of engine: the slow link, one of network.links", NOT_EMPTY)
    )
    factor: float = field(metadata=field_doc("divisor of the bandwidth", FACTOR))


@attrs.frozen(kw_only=True)
class NicDownFault(Timed):
    """One NIC of each of an engine's GPUs fails; its transfers are retried over the remaining NICs."""

    engine: str = field(metadata=field_doc("the engine; `*` matches any part of a name", NOT_EMPTY))
    nic: int = field(
        default=0, metadata=field_doc("number of the NIC, from 0, below network.nics_per_rank", NOT_NEGATIVE)
    )


@attrs.frozen(kw_only=True)
class CrashFault(Timed):
    """All processes of an engine die. Its queue, its KV cache and its protocol state are lost."""

    engine: str = field(metadata=field_doc("the engine; `*` matches any part of a name", NOT_EMPTY))
    restart_after_s: float | None = field(
        default=None,
        metadata=field_doc(
            "time until the engine has restarted, empty; default: it does not restart (but see heal_s)", DELAY
        ),
    )
    engine_id: Literal["same", "new"] = field(
        default="same", metadata=field_doc("whether the restarted engine has the same engine id")
    )
    incarnation: Literal["new", "same"] = field(
        default="new",
        metadata=field_doc(
            "same (vllm-compat only): the restarted engine's handshake does not show that it was restarted"
        ),
    )
    in_flight: Literal["lands", "cut"] = field(
        default="lands", metadata=field_doc("whether a WRITE that its NIC has begun still lands")
    )


@attrs.frozen(kw_only=True)
class PauseFault(Timed):
    """An engine stops for a time (descheduled, garbage collection, a long step) and then continues."""

    engine: str = field(metadata=field_doc("the engine; `*` matches any part of a name", NOT_EMPTY))
    scope: Literal["process", "step"] = field(
        default="process",
        metadata=field_doc(
            "process: the whole process stops, only its NICs continue; step: only the running step takes longer"
        ),
    )


@attrs.frozen(kw_only=True)
class SkewFault(Timed):
    """An engine's clock is wrong. Its deadlines are affected, its step times are not."""

    engine: str = field(metadata=field_doc("the engine; `*` matches any part of a name", NOT_EMPTY))
    speed: float = field(default=1.0, metadata=field_doc("speed of the clock: 1.1 gains 0.1 s per second", SCALE))
    offset_s: float = field(default=0.0, metadata=field_doc("jump of the clock when the fault begins", DELAY))


@attrs.frozen(kw_only=True)
class TransferErrorFault(OnLinks):
    """A WRITE or READ ends with an error."""

    probability: float | None = field(default=None, metadata=field_doc(PROBABILITY, SHARE))
    stage: Literal["start", "in-flight", "landed"] = field(
        default="in-flight",
        metadata=field_doc(
            "when the error occurs: before any byte moves, halfway, or after all data and the notification have arrived"
        ),
    )


@attrs.frozen(kw_only=True)
class HandshakeErrorFault(OnLinks):
    """A handshake fails."""

    probability: float | None = field(default=None, metadata=field_doc(PROBABILITY, SHARE))
    delay_s: float | None = field(
        default=None, metadata=field_doc("time until the handshake fails; default: network.handshake_s", DELAY)
    )


@attrs.frozen(kw_only=True)
class HangUpFault(Timed):
    """Clients cancel: many at once, or each at its own random time."""

    probability: float | None = field(
        default=None,
        metadata=field_doc(
            "probability for each request: those open at that time, or with within_s each that arrives; default: 1",
            SHARE,
        ),
    )
    within_s: float | None = field(
        default=None,
        metadata=field_doc(
            "each client cancels at a random time of up to this long after its request's arrival", TIMER
        ),
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
            "from this time on no fault acts and every engine is up; every open request must then end within "
            "a bounded time",
            DELAY,
        ),
    )
    transport_timeout_s: float = field(
        default=7.0,
        metadata=field_doc(
            "a WRITE or READ whose peer does not answer fails after this time (UCX: UCX_RC_TIMEOUT 1 s, 7 retries)",
            TIMER,
        ),
    )
