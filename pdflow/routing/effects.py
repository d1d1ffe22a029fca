"""The router's effects: legs to dispatch and to abort, reports to D, and the answer to the client."""

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
    """Dispatch a request to a D that computes the prompt too: there is no prefill leg, and no KV arrives."""

    engine: int
    request: int
    request_id: RequestId


class AbortLeg(Value, frozen=True, gc=False):
    """Abort a leg that has not ended; ignored by an engine that does not have it."""

    role: Literal["prefill", "decode"]
    engine: int
    request_id: RequestId


class ReportPrefill(Value, frozen=True, gc=False):
    """Tell D how its prefill leg ended: with a P that cannot be asked, its quarantine depends on it (7.2)."""

    engine: int
    request_id: RequestId
    ok: bool


class Reply(Value, frozen=True, gc=False):
    """Answer the client: the request has ended. Exactly one for each request."""

    request: int
    outcome: Literal["completed", "failed", "cancelled"]
    code: Code
    attempts: int
    reason: str = ""
    """The reason, where no code expresses it."""


class ResumeAnswer(Value, frozen=True, gc=False):
    """Continue the client's answer by this attempt, which is dispatched next, behind the tokens that the client has:
    these are the end of its prompt. Nothing of another attempt is passed on any more."""

    request: int
    request_id: RequestId


class EngineLeft(Value, frozen=True, gc=False):
    """Report that an engine has left: no attempt has a leg at it, or KV from it. It may still hold KV under a lease."""

    engine: str


class EngineSilent(Value, frozen=True, gc=False):
    """Report that an engine is no longer a member, and gets no legs until it reports again."""

    engine: str
    abandoned: bool = False
    """Its connections must be broken: the driver reports `EngineLost` then."""


class AskEngine(Value, frozen=True, gc=False):
    """Ask an engine for any response, as of its health. The next check reports whether it has come (`EnginesChecked`).
    An engine that has not responded yet need not be asked again."""

    engine: str


class EngineWatched(Value, frozen=True, gc=False):
    """Report whether the router relies on the answers of an engine (`watching`).

    `stalled`: it owes answers and gives none, so it gets no new legs, and its legs go elsewhere if they can; `trial`:
    after a pause it gets one leg at a time; `answers`: it gets legs like any other again.
    """

    engine: str
    state: Literal["stalled", "trial", "answers"]


class RequestHangs(Value, frozen=True, gc=False):
    """Report that an attempt is about to leave an engine that serves others and passes it over (`passes`)."""

    engine: str
    request_id: RequestId


RouterEffect: TypeAlias = (
    DispatchPrefill
    | DispatchDecode
    | DispatchAlone
    | AbortLeg
    | ReportPrefill
    | ResumeAnswer
    | Reply
    | EngineLeft
    | EngineSilent
    | AskEngine
    | EngineWatched
    | RequestHangs
)
RouterEffects: TypeAlias = tuple[RouterEffect, ...]
