"""The router, live: its endpoint, which is the one that is simulated, and the legs that its effects are.

The endpoint says which engines serve a request, in which order, and what follows from a failure. It is told when a
client receives the start of an answer, because that decides whether another attempt may follow
(`pdflow/routing/failure.py`).
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Final

import trio

from pdflow.protocol.ids import EngineInfo, KvParams
from pdflow.protocol.messages import Code
from pdflow.protocol.values import RequestId
from pdflow.routing.governed import GovernedRouter
from pdflow.routing.router import (
    AbortLeg,
    ClientGone,
    DecodeEnded,
    DispatchAlone,
    DispatchDecode,
    DispatchPrefill,
    EngineLeft,
    EngineSilent,
    PrefillAnswered,
    Reply,
    TokenCame,
)
from pdflow.serving.core import Port
from pdflow.wiring.stores import node_of
from runtime.call import Call, Leg
from runtime.clock import now_ns
from runtime.diary import LAST
from runtime.http.client import HttpClient
from runtime.http.errors import OpenAIError
from runtime.http.messages import EVENT_STREAM, JSON
from runtime.http.openai.between import Between, FirstAnswer
from runtime.http.relay import break_off
from runtime.kv_params import Coordinates, decode_json, prefill_json
from runtime.members import Members
from runtime.meter import RouterMeter
from runtime.node import Node
from runtime.routing import arrival
from runtime.signed import UNSIGNED, Signer

log = logging.getLogger(__name__)

NOT_UP: Final = Coordinates("-", 0)
"""Where a node of a store is that is not there."""
STATUS: Final = {Code.REJECTED: 400, Code.DEADLINE: 504}
NUMBERS: Final = 40
"""Bits of the first request's number: one life's ids are not another's, which engines may still remember."""


class RouterNode(Node):
    """Args: the engines of each role, as the endpoint counts them; method is the scenario's; `stores` are the nodes of
    its store, by number; `tells_first`: the client has its first token from P."""

    def __init__(
        self,
        router: GovernedRouter,
        prefill: list[EngineInfo],
        decode: list[EngineInfo],
        method: str,
        client: HttpClient,
        patience_s: float = math.inf,
        signer: Signer = UNSIGNED,
        stores: Sequence[str] = (),
        tells_first: bool = False,
    ) -> None:
        super().__init__("router")
        self.router: Final = router
        self.port: Final = self.add("router", router, 0)
        self.prefill: Final = prefill
        self.decode: Final = decode
        self.diary.engines = (prefill, decode)
        self.method: Final = method
        self.client: Final = client
        self.patience_s: Final = patience_s
        self.signer: Final = signer
        self.tells_first: Final = tells_first
        self.members: Final = Members(
            router, stores, partial(self.put, self.port), lambda place: client.forget(place.http.host, place.http.port)
        )
        self.calls: dict[int, Call] = {}
        self.legs: dict[tuple[str, RequestId], trio.CancelScope] = {}
        """Those that may be taken back: under way, or about to be."""
        self.left: Callable[[str], None] = ignore
        """Told of each engine that was to get nothing new, once nothing there is wanted any more."""
        self.meter: Final = RouterMeter()
        self._number = secrets.randbits(NUMBERS)
        self.do.update(
            {
                DispatchPrefill: self.dispatch_prefill,
                DispatchDecode: self.dispatch_decode,
                DispatchAlone: self.dispatch_alone,
                AbortLeg: self.abort_leg,
                EngineLeft: self.engine_left,
                EngineSilent: self.engine_silent,
                Reply: self.reply,
            }
        )

    async def serve(self, call: Call) -> None:
        """Until the client has its answer. Cancelled: it has gone away."""
        self._number += 1
        number = self._number
        async with trio.open_nursery() as nursery:
            call.nursery = nursery
            call.first = lambda _: self._first(call, number)
            call.spoke = lambda request_id: self.put(self.port, TokenCame(number, request_id))
            self.calls[number] = call
            self.meter.open.inc()
            alone = self.tells_first and call.one_token
            self.put(self.port, arrival(self.router, number, call.tokens, call.session, alone))
            try:
                await call.over.wait()
            finally:
                # Before the nursery is closed: what is dispatched from now on finds nobody to do it for.
                del self.calls[number]
                self.meter.open.dec()
                if not call.over.is_set():
                    self.put(self.port, ClientGone(number))
            nursery.cancel_scope.cancel()

    def _first(self, call: Call, number: int) -> None:
        """The first piece of its answer is here."""
        self.meter.first_token(call.begun_ns)
        self.diary.heard(number)

    # Effects.

    def dispatch_prefill(self, port: Port, effect: DispatchPrefill) -> None:
        call, place = self.calls.get(effect.request), self.members.places.get(self.prefill[effect.engine].engine)
        if call is None or place is None:
            self.put(self.port, PrefillAnswered(effect.request_id, None, Code.UNREACHABLE))
            return
        leg = Leg(call, self.client, place, effect.request_id, self.patience_s, self.signer)
        sent = self._prefill(call, leg, effect) if effect.keeps else self._aggregated(call, leg, effect)
        self._begin(call, "prefill", effect.request_id, sent)

    async def _prefill(self, call: Call, leg: Leg, effect: DispatchPrefill) -> None:
        stores = tuple(NOT_UP if place is None else place.http for place in self.members.stores.values())
        about = prefill_json(effect.xid, self.method, stores)
        tells_first = self.tells_first and call.told is None
        if tells_first:
            between = Between(tells_first=True, decodes=self.router.dispatch == "concurrent")
            body = call.decode_body(about, between)
        else:
            body = call.prefill_body(about)
        params, first, code = await leg.prefill(body, self.method, tells_first)
        ends = first is not None and await self._told(call, first, effect.request_id)
        self.put(self.port, PrefillAnswered(effect.request_id, params, code, ends))

    async def _told(self, call: Call, said: FirstAnswer, request_id: RequestId) -> bool:
        """P has told the first token; whether it is the last one. What the client has heard before is kept to."""
        if call.told is not None or call.speaker is not None:
            return False
        call.told = said.first
        text, responder = said.said.encode(), call.responder
        if said.ends:
            call.speaks(request_id)
            self.diary.passed(request_id, LAST)
        if call.streams:
            call.piece(text)
            await responder.begin(200, (EVENT_STREAM, *call.answered))
            responder.begin_now(text)
            if said.ends:
                await responder.end()
        elif said.ends:
            call.piece(text)
            await responder.reply(200, (JSON, *call.answered), text)
        for leg, place in () if said.ends else call.awaiting.items():
            told = Leg(call, self.client, place, leg, self.patience_s, self.signer)
            call.nursery.start_soon(told.tell, said.first)
        call.awaiting.clear()
        return said.ends

    async def _aggregated(self, call: Call, leg: Leg, effect: DispatchPrefill) -> None:
        """A prefill leg that no other follows: its answer is the client's."""
        code = await self._answer(call, leg, self._alone_body(call, leg))
        info = self.prefill[effect.engine]
        params = KvParams(info, effect.xid, effect.request_id, 0) if code is Code.NONE else None
        if params is not None:
            self.diary.passed(effect.request_id, LAST)
        self.put(self.port, PrefillAnswered(effect.request_id, params, code))

    def dispatch_decode(self, port: Port, effect: DispatchDecode) -> None:
        call, place = self.calls.get(effect.request), self.members.places.get(self.decode[effect.engine].engine)
        engine = effect.params.prefill.engine
        stores = self.members.stores
        source = stores.get(node_of(engine)) if stores else self.members.places.get(engine)
        if call is None or place is None or source is None:
            self.put(self.port, DecodeEnded(effect.request_id, Code.UNREACHABLE))
            return
        leg = Leg(call, self.client, place, effect.request_id, self.patience_s, self.signer)
        between = None
        if self.tells_first:
            between = Between(first=call.told, first_follows=call.told is None)
            if call.told is None:
                call.awaiting[effect.request_id] = place
        body = call.decode_body(self._params(effect.params, source.kv), between)
        self._begin(call, "decode", effect.request_id, self._decode(call, leg, effect.request_id, body))

    def dispatch_alone(self, port: Port, effect: DispatchAlone) -> None:
        call, place = self.calls.get(effect.request), self.members.places.get(self.decode[effect.engine].engine)
        if call is None or place is None:
            self.put(self.port, DecodeEnded(effect.request_id, Code.UNREACHABLE))
            return
        leg = Leg(call, self.client, place, effect.request_id, self.patience_s, self.signer)
        body = self._alone_body(call, leg)
        self._begin(call, "decode", effect.request_id, self._decode(call, leg, effect.request_id, body))

    async def _decode(self, call: Call, leg: Leg, request_id: RequestId, body: bytes) -> None:
        try:
            code = await self._answer(call, leg, body)
        finally:
            call.awaiting.pop(request_id, None)
        self.put(self.port, DecodeEnded(request_id, code))

    def _alone_body(self, call: Call, leg: Leg) -> bytes:
        """For an engine that computes the prompt, too, and perhaps a token that the client has."""
        leg.goes_on = call.told is not None
        return call.decode_body(None, None if call.told is None else Between(first=call.told))

    async def _answer(self, call: Call, leg: Leg, body: bytes) -> Code:
        """How the leg ended whose answer is the client's. Where the client hears another attempt, this one does not
        end: the endpoint takes it back, since it has been told of that attempt's first token."""
        code = await leg.decode(body) if call.speaker is None else None
        if code is None:
            await trio.sleep_forever()
        return code

    def abort_leg(self, port: Port, effect: AbortLeg) -> None:
        scope = self.legs.get((effect.role, effect.request_id))
        if scope is not None:
            scope.cancel()

    def engine_left(self, port: Port, effect: EngineLeft) -> None:
        log.info("%s has nothing to do any more", effect.engine)
        self.left(effect.engine)

    def engine_silent(self, port: Port, effect: EngineSilent) -> None:
        log.warning("%s has not reported for too long: it gets no requests", effect.engine)

    def reply(self, port: Port, effect: Reply) -> None:
        call = self.calls.get(effect.request)
        begun_ns = now_ns() if call is None else call.begun_ns
        self.meter.over(begun_ns, effect.outcome, effect.code.name.lower(), effect.attempts)
        if call is None:
            return
        if effect.outcome != "completed":
            call.nursery.start_soon(self._fail, call, effect)
        else:
            call.over.set()

    async def _fail(self, call: Call, effect: Reply) -> None:
        """Tell the client. What it has received of an answer cannot be said again: that answer breaks off."""
        if call.responder.begun:
            log.warning("an answer broke off: %s", effect.code.name)
            async with call.answering:
                await break_off(call.responder, OpenAIError(502, "the answer broke off", code=effect.code.name))
            call.over.set()
            return
        error = call.refusal or OpenAIError(
            429 if effect.reason else STATUS.get(effect.code, 503),
            effect.reason or f"no answer: {effect.code.name.lower()}",
            code=effect.code.name,
        )
        await call.responder.reply(error.status, (JSON,), error.body())
        call.over.set()

    def _params(self, params: KvParams, at: Coordinates) -> dict[str, object]:
        return decode_json(params, at, self.method)

    def _begin(self, call: Call, role: str, request_id: RequestId, leg: Coroutine[Any, Any, None]) -> None:
        """A leg, which may be taken back from now on: perhaps before its task has had its first turn."""
        scope = self.legs[role, request_id] = trio.CancelScope()

        async def run() -> None:
            try:
                with scope:
                    await trio.lowlevel.checkpoint_if_cancelled()
                    await leg
            finally:
                leg.close()
                del self.legs[role, request_id]

        call.nursery.start_soon(run)


def ignore(engine: str) -> None:
    pass
