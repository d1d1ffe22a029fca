"""The router's events: what clients, engines and their connections report to it."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

from pdflow.protocol.events import TimeReached
from pdflow.protocol.ids import EngineInfo, KvParams
from pdflow.protocol.messages import Code
from pdflow.protocol.values import EngineId, RequestId, Value

NO_SESSION: Final = -1
"""The `session` of a request that belongs to none."""


class RequestArrived(Value, frozen=True, gc=False):
    """A request has arrived. `request`: the router's own number of it, never used twice. Fields for policies may be
    left out."""

    request: int
    prefill_only: bool = False
    """The request wants one token, and P's is given to the client: there is nothing to decode."""
    prompt_tokens: int = 0
    prefix: tuple[int, ...] = ()
    """Names of the prompt's full prefix blocks; each stands for all before it, too."""
    session: int = NO_SESSION
    streams: bool = True
    """Whether the client receives the answer token by token. If not, an engine gives no sign of it before its end."""
    resumable: bool = True
    """Whether another attempt could continue its answer: what the client receives must allow it."""


class PrefillAnswered(Value, frozen=True, gc=False):
    """The prefill leg ended: well if `params` is given. At an aggregated engine the whole request ended with it."""

    request_id: RequestId
    params: KvParams | None
    code: Code = Code.NONE
    ends: bool = False
    """P's token, which the client has, is the last one: nothing is left to decode."""


class DecodeEnded(Value, frozen=True, gc=False):
    """The decode leg ended: with all its tokens, or with a code that says why not."""

    request_id: RequestId
    code: Code = Code.NONE


class ClientGone(Value, frozen=True, gc=False):
    request: int


class EngineChanged(Value, frozen=True, gc=False):
    """An engine came up or went down: it gets new legs or none. Legs that it has go on."""

    engine: str
    up: bool
    became: EngineInfo | None = None
    """The new id and sharding of an engine that came up under another id."""


class EngineLost(Value, frozen=True, gc=False):
    """The router's connections to an engine broke: it is down, and the legs that it had will not be answered."""

    engine: str


class EngineLeaves(Value, frozen=True, gc=False):
    """An engine is to stop: it gets no new legs, and `EngineLeft` reports when no attempt needs it any more."""

    engine: str


class EngineJoins(Value, frozen=True, gc=False):
    """An engine that has left, or is leaving, gets legs again."""

    engine: str


class EngineReported(Value, frozen=True, gc=False):
    """An engine has sent a heartbeat: the one at this position is up, with the id in `info`."""

    role: Literal["prefill", "decode"]
    engine: int
    info: EngineInfo


class EnginesChecked(Value, frozen=True, gc=False):
    """The driver has checked which engines have sent anything of an answer since its last check, and which of those
    that it was to ask (`AskEngine`) have responded. It checks at the interval of the router's `StallRule`.

    `idle`: of the engines that have responded, those that have run no step since they did before; `quiet`: attempts
    whose answers have begun to come, and of which nothing has come since the last check.
    """

    active: tuple[EngineId, ...]
    responding: tuple[EngineId, ...] = ()
    idle: tuple[EngineId, ...] = ()
    quiet: tuple[RequestId, ...] = ()


class FirstTokenDelivered(Value, frozen=True, gc=False):
    """The client has received the first token of this attempt from the engine that decodes it.

    To be reported before the attempt's end, of one attempt of a request at most.
    """

    request: int
    request_id: RequestId


class AnswerEnded(Value, frozen=True, gc=False):
    """An answer that was to be resumed has ended instead. The client has all of it (code NONE), or it cannot continue,
    since the client has received an incomplete piece or the engine's error."""

    request: int
    code: Code


RouterEvent: TypeAlias = (
    RequestArrived
    | PrefillAnswered
    | DecodeEnded
    | ClientGone
    | EngineChanged
    | EngineLost
    | EngineLeaves
    | EngineJoins
    | EngineReported
    | EnginesChecked
    | FirstTokenDelivered
    | AnswerEnded
    | TimeReached
)
"""Every event of a router. `Router` does not handle EngineLeaves, EngineJoins and EngineReported, only
`WatchingRouter` handles EnginesChecked, and only `HedgingRouter` TimeReached."""
