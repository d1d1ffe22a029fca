"""The router's effects: legs to dispatch and to take back, what D is told, and the answer to the client."""

from __future__ import annotations

from typing import Literal, TypeAlias

from pdflow.protocol.ids import KvParams
from pdflow.protocol.messages import Code
from pdflow.protocol.values import RequestId, Value, Xid


class DispatchPrefill(Value, frozen=True, gc=False):
    engine: int
    request: int
    request_id: RequestId
    xid: Xid
    keeps: bool = True
    """Whether a decode leg will come for the KV (vLLM's do_remote_decode)."""


class DispatchDecode(Value, frozen=True, gc=False):
    engine: int
    request: int
    request_id: RequestId
    params: KvParams


class DispatchAlone(Value, frozen=True, gc=False):
    """D is to compute the prompt, too: no prefill leg is behind it, and no KV comes."""

    engine: int
    request: int
    request_id: RequestId


class AbortLeg(Value, frozen=True, gc=False):
    """Take back a leg that has not ended; ignored by an engine that does not have it."""

    role: Literal["prefill", "decode"]
    engine: int
    request_id: RequestId


class ReportPrefill(Value, frozen=True, gc=False):
    """Tell D how its prefill leg ended: against a P that cannot be asked, its quarantine rests on it (7.2)."""

    engine: int
    request_id: RequestId
    ok: bool


class Reply(Value, frozen=True, gc=False):
    """The request's one end."""

    request: int
    outcome: Literal["completed", "failed", "cancelled"]
    code: Code
    attempts: int
    reason: str = ""
    """Why, where no code says it."""


class EngineLeft(Value, frozen=True, gc=False):
    """No attempt has a leg at this engine, or KV from it. It may hold KV under a lease still."""

    engine: str


class EngineSilent(Value, frozen=True, gc=False):
    """An engine is no member any more, and gets no legs until it reports again."""

    engine: str


RouterEffect: TypeAlias = (
    DispatchPrefill | DispatchDecode | DispatchAlone | AbortLeg | ReportPrefill | Reply | EngineLeft | EngineSilent
)
RouterEffects: TypeAlias = tuple[RouterEffect, ...]
