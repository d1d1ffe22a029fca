"""The router, live: its endpoint, which is the one that is simulated, and the legs that its effects are.

The endpoint says which engines serve a request, in which order, and what follows from a failure. Which attempt streams
the answer, and which decode legs are told P's first token, is decided in `pdflow/routing/answer.py`. The endpoint is
told which attempt streams, because no other attempt may follow then (`pdflow/routing/failure.py`).
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Final, Literal

import trio

from pdflow.protocol.ids import EngineInfo, KvParams
from pdflow.protocol.messages import Code
from pdflow.protocol.values import RequestId
from pdflow.routing.answer import Answer, Ending
from pdflow.routing.effects import (
    AbortLeg,
    AskEngine,
    DispatchAlone,
    DispatchDecode,
    DispatchPrefill,
    EngineLeft,
    EngineSilent,
    EngineWatched,
    Reply,
    RequestHangs,
    ResumeAnswer,
)
from pdflow.routing.events import (
    AnswerEnded,
    ClientGone,
    DecodeEnded,
    EngineLost,
    FirstTokenDelivered,
    PrefillAnswered,
)
from pdflow.routing.governed import GovernedRouter
from pdflow.serving.core import Port
from pdflow.wiring.stores import node_of
from pdflow_runtime.clock import now_ns
from pdflow_runtime.http.client import HttpClient
from pdflow_runtime.http.errors import OpenAIError
from pdflow_runtime.http.messages import EVENT_STREAM, JSON
from pdflow_runtime.http.openai.between import Between, FirstAnswer
from pdflow_runtime.http.relay import break_off
from pdflow_runtime.nodes.kv_params import Coordinates, decode_json, prefill_json
from pdflow_runtime.nodes.node import LiveNode
from pdflow_runtime.observe.event_log import LAST
from pdflow_runtime.observe.router_metrics import SHED, RouterMeter
from pdflow_runtime.router.call import Call, Leg
from pdflow_runtime.router.engine_checks import EngineChecks, log_watched
from pdflow_runtime.router.members import Members
from pdflow_runtime.router.routing import arrival
from pdflow_runtime.security.signed import UNSIGNED, Signer

log = logging.getLogger(__name__)

NOT_UP: Final = Coordinates("-", 0)
"""The address of a store's node that is not up."""
STATUS: Final = {Code.REJECTED: 400, Code.DEADLINE: 504}
NUMBERS: Final = 52
"""Bits of the first request's number: no incarnation reuses an earlier one's ids, which engines may remember, and two
routers in front of the same engines use no common ids (after 10^9 requests each, with a probability of 5e-7). A number
is exact in every reader of JSON, which limits it to 53 bits."""


class LiveRouterNode(LiveNode):
    """The node that drives the router's endpoint. Args: the engines of each role, as the endpoint counts them; method
    is the scenario's; `stores` are the nodes of its store, by number; `returns_first_token`: the client has its first
    token from P."""

    def __init__(
        self,
        router: GovernedRouter,
        prefill: list[EngineInfo],
        decode: list[EngineInfo],
        method: str,
        client: HttpClient,
        leg_timeout_s: float = math.inf,
        signer: Signer = UNSIGNED,
        stores: Sequence[str] = (),
        returns_first_token: bool = False,
        model: str = "",
    ) -> None:
        super().__init__("router")
        self.router: Final = router
        self.port: Final = self.add("router", router, 0)
        self.prefill: Final = prefill
        self.decode: Final = decode
        self.event_log.engines = (prefill, decode)
        self.method: Final = method
        self.client: Final = client
        self.leg_timeout_s: Final = leg_timeout_s
        self.signer: Final = signer
        self.returns_first_token: Final = returns_first_token
        self.members: Final = Members(
            router,
            stores,
            partial(self.put, self.port),
            lambda address: client.forget(address.http.host, address.http.port),
        )
        self.calls: Final[dict[int, Call]] = {}
        self.checks: Final = EngineChecks(
            router, partial(self.put, self.port), self.calls, client, self.members.addresses
        )
        self.legs: dict[tuple[str, RequestId], trio.CancelScope] = {}
        """Legs that can be cancelled: under way, or about to be."""
        self.left: Callable[[str], None] = ignore
        """Called with each engine that was drained, once nothing there is wanted any more."""
        self.meter: Final = RouterMeter(model)
        self.meter.passing = lambda: sum(call.pieces.tokens_so_far for call in self.calls.values())
        self._number = secrets.randbits(NUMBERS)
        self.do.update(
            {
                DispatchPrefill: self.dispatch_prefill,
                DispatchDecode: self.dispatch_decode,
                DispatchAlone: self.dispatch_alone,
                AbortLeg: self.abort_leg,
                EngineLeft: self.engine_left,
                EngineSilent: self.engine_silent,
                AskEngine: lambda port, effect: self.checks.ask(effect),
                EngineWatched: self.engine_watched,
                RequestHangs: self.request_hangs,
                Reply: self.reply,
                ResumeAnswer: self.resume_answer,
            }
        )

    async def serve(self, call: Call) -> None:
        """Serve the call until the client has its answer. A cancellation means that the client has gone away."""
        self._number += 1
        number = call.number = call.record.number = self._number
        async with trio.open_nursery() as nursery:
            call.nursery = nursery
            call.pieces.first = partial(self._first, call, number)
            call.answer = Answer(call.streams, self.returns_first_token)
            call.report = lambda request_id: self.put(self.port, FirstTokenDelivered(number, request_id))
            call.pieces.active = self.checks.active
            call.resumed, call.model = self.meter.resumed.inc, self.meter.model
            self.calls[number] = call
            self.meter.open.inc()
            alone = call.prompt_alone or (self.returns_first_token and call.one_token)
            self.put(self.port, arrival(self.router, call, alone))
            try:
                await call.over.wait()
            finally:
                # Before the nursery is closed: what is dispatched from now on finds nobody to do it for.
                del self.calls[number]
                self.meter.open.dec()
                if not call.over.is_set():
                    call.record.outcome = "cancelled"
                    call.answer.ended("cancelled")
                    self.put(self.port, ClientGone(number))
                call.record.answer = call.ended()
                self.meter.answered(call.record.outcome, call.record.answer)
            if nursery.child_tasks:
                nursery.cancel_scope.cancel()

    def _first(self, call: Call, number: int) -> None:
        """Record that the first piece of the answer is here."""
        call.record.first_ns = now_ns()
        self.meter.first_token(call.begun_ns, len(call.tokens), call.streams)
        self.event_log.first_piece_passed(number)

    # Effects.

    def dispatch_prefill(self, port: Port, effect: DispatchPrefill) -> None:
        call, address = self.calls.get(effect.request), self.members.addresses.get(self.prefill[effect.engine].engine)
        if call is None or address is None:
            self.put(self.port, PrefillAnswered(effect.request_id, None, Code.UNREACHABLE))
            return
        call.record.prefill = address.engine
        leg = Leg(call, self.client, address, effect.request_id, self.leg_timeout_s, self.signer)
        if effect.keeps:
            sent = self._prefill(call, leg, effect, call.answer.prefill_dispatched())
        else:
            sent = self._aggregated(call, leg, effect, self._alone(call, effect.request_id))
        self._begin(leg, "prefill", sent)

    async def _prefill(self, call: Call, leg: Leg, effect: DispatchPrefill, returns_first_token: bool) -> None:
        stores = tuple(NOT_UP if address is None else address.http for address in self.members.stores.values())
        kv_params = prefill_json(effect.xid, self.method, stores)
        if returns_first_token:
            between = Between(returns_first_token=True, decodes=self.router.dispatch == "concurrent")
            body = call.decode_body(kv_params, between)
        else:
            body = call.prefill_body(kv_params)
        params, first, code = await leg.prefill(body, self.method, returns_first_token)
        leg.code = code
        ends = (
            returns_first_token
            and first is not None
            and await self._first_token_received(call, first, effect.request_id)
        )
        self.put(self.port, PrefillAnswered(effect.request_id, params, code, ends))

    async def _first_token_received(self, call: Call, first_answer: FirstAnswer, request_id: RequestId) -> bool:
        """Pass P's first token on to the client and to the decode legs; True if the answer ends with it."""
        use = call.answer.first_token_received(request_id, first_answer.ends)
        if use is None:
            return False
        call.first_token = first_answer.first
        text, responder = first_answer.text.encode(), call.responder
        if first_answer.ends:
            call.report(request_id)
            self.event_log.passed(request_id, LAST)
        if call.streams:
            first = first_answer.first
            call.pieces.add_first_token(first.token, first.id, first.created)
            await responder.begin(200, (EVENT_STREAM, *call.answered))
            responder.begin_now(text)
            if first_answer.ends:
                await responder.end()
        elif first_answer.ends:
            call.pieces.add(text)
            await responder.reply(200, (JSON, *call.answered), text)
        for attempt in use.forward:
            leg = Leg(call, self.client, call.decoding[attempt], attempt, self.leg_timeout_s, self.signer)
            call.nursery.start_soon(leg.forward, first_answer.first)
        for attempt in use.cancel:
            self._cancel_leg(attempt)
        return first_answer.ends

    def _cancel_leg(self, attempt: RequestId) -> None:
        """Cancel the leg of an engine that computes the prompt too: the attempt fails."""
        if ("decode", attempt) in self.legs:
            self.legs["decode", attempt].cancel()
            self.put(self.port, DecodeEnded(attempt, Code.CANCELLED))
        else:
            self.legs["prefill", attempt].cancel()
            self.put(self.port, PrefillAnswered(attempt, None, Code.CANCELLED))

    async def _aggregated(self, call: Call, leg: Leg, effect: DispatchPrefill, between: Between | None) -> None:
        """Run a prefill leg that no other follows: its answer is the client's."""
        code = await self._answer(leg, call.decode_body(None, between))
        info = self.prefill[effect.engine]
        params = KvParams(info, effect.xid, effect.request_id, 0) if code is Code.NONE else None
        if params is not None:
            self.event_log.passed(effect.request_id, LAST)
        self.put(self.port, PrefillAnswered(effect.request_id, params, code))

    def dispatch_decode(self, port: Port, effect: DispatchDecode) -> None:
        call, address = self.calls.get(effect.request), self.members.addresses.get(self.decode[effect.engine].engine)
        engine = effect.params.prefill.engine
        stores = self.members.stores
        source = stores.get(node_of(engine)) if stores else self.members.addresses.get(engine)
        if call is None or address is None or source is None:
            self.put(self.port, DecodeEnded(effect.request_id, Code.UNREACHABLE))
            return
        call.record.decode = address.engine
        leg = Leg(call, self.client, address, effect.request_id, self.leg_timeout_s, self.signer)
        between = None
        if self.returns_first_token:
            call.decoding[effect.request_id] = address
            between = Between(first=call.first_token, first_follows=call.answer.decode_dispatched(effect.request_id))
        self._begin(leg, "decode", self._decode(leg, self._params(effect.params, source.kv), between))

    def dispatch_alone(self, port: Port, effect: DispatchAlone) -> None:
        call, address = self.calls.get(effect.request), self.members.addresses.get(self.decode[effect.engine].engine)
        if call is None or address is None:
            self.put(self.port, DecodeEnded(effect.request_id, Code.UNREACHABLE))
            return
        call.record.decode = address.engine
        leg = Leg(call, self.client, address, effect.request_id, self.leg_timeout_s, self.signer)
        self._begin(leg, "decode", self._decode(leg, None, self._alone(call, effect.request_id)))

    async def _decode(self, leg: Leg, params: dict[str, Any] | None, between: Between | None) -> None:
        code = await self._answer(leg, leg.call.decode_body(params, between))
        self.put(self.port, DecodeEnded(leg.request_id, code))

    def _alone(self, call: Call, request_id: RequestId) -> Between | None:
        """Return what an engine that computes the prompt too must know: the first token, if the client has it."""
        continues = call.answer.alone_dispatched(request_id)
        return Between(first=call.first_token) if continues else None

    async def _answer(self, leg: Leg, body: bytes) -> Code:
        """Run a leg that brings an answer, and return how it ended. A leg whose answer is dropped waits until it is
        cancelled."""
        code = leg.code = await leg.decode(body)
        if code is None:
            await trio.sleep_forever()
        return code

    def resume_answer(self, port: Port, effect: ResumeAnswer) -> None:
        call = self.calls.get(effect.request)
        if call is not None:
            call.answer.resume(effect.request_id)

    def abort_leg(self, port: Port, effect: AbortLeg) -> None:
        scope = self.legs.get((effect.role, effect.request_id))
        if scope is not None:
            scope.cancel()

    def engine_left(self, port: Port, effect: EngineLeft) -> None:
        log.info("%s is drained: no open request needs it", effect.engine)
        self.left(effect.engine)

    def engine_silent(self, port: Port, effect: EngineSilent) -> None:
        log.warning(
            "%s missed its reports (router.silent_after_s): it gets no new requests until it reports again%s",
            effect.engine,
            "; its open requests are retried, resumed or fail" if effect.abandoned else "",
        )
        if effect.abandoned:
            self.put(self.port, EngineLost(effect.engine))

    def engine_watched(self, port: Port, effect: EngineWatched) -> None:
        if effect.state == "stalled":
            self.meter.stalled.inc()
        log_watched(effect)

    def request_hangs(self, port: Port, effect: RequestHangs) -> None:
        self.meter.hanging.inc()
        log.warning(
            "%s hangs at %s, which serves others: it is retried or resumed elsewhere (router.stalled_after_s)",
            effect.request_id,
            effect.engine,
        )

    def reply(self, port: Port, effect: Reply) -> None:
        call = self.calls.get(effect.request)
        begun_ns = now_ns() if call is None else call.begun_ns
        self.meter.over(begun_ns, effect.outcome, effect.code, effect.attempts, shed=bool(effect.reason))
        if call is None:
            return
        record = call.record
        record.outcome, record.code, record.attempts = effect.outcome, effect.code.name.lower(), effect.attempts
        if effect.reason:
            record.code = SHED
        ending = call.answer.ended(effect.outcome)
        if ending is Ending.NOTHING:
            call.over.set()
        else:
            call.nursery.start_soon(self._fail, call, effect, ending)

    async def _fail(self, call: Call, effect: Reply, ending: Ending) -> None:
        """Send the client the error. An answer of which the client has received a part cannot begin again: it breaks
        off."""
        if ending is Ending.BREAK_OFF:
            async with call.answering:
                if call.received_all and not call.responder.done:
                    # Nothing is missing but that the client takes the rest.
                    await call.responder.end()
                    call.over.set()
                    return
                log.warning("an answer was interrupted after its first token: %s", effect.code.name)
                await break_off(call.responder, OpenAIError(502, "the answer was interrupted", code=effect.code.name))
            call.over.set()
            return
        error = call.refusal or OpenAIError(
            429 if effect.reason else STATUS.get(effect.code, 503),
            effect.reason or f"the request failed: {effect.code.name.lower()}",
            code=effect.code.name,
        )
        await call.responder.reply(error.status, error.headers, error.body())
        call.over.set()

    def _params(self, params: KvParams, at: Coordinates) -> dict[str, Any]:
        return decode_json(params, at, self.method)

    def _begin(self, leg: Leg, role: Literal["prefill", "decode"], running: Coroutine[Any, Any, None]) -> None:
        """Start a leg, which can be cancelled from now on, perhaps before its task first runs. A leg that the answer
        cannot come from any more is not sent, and waits until it is cancelled."""
        call, request_id = leg.call, leg.request_id
        if call.trace is not None:
            leg.trace = call.trace.leg(role, request_id, leg.address)
        scope = self.legs[role, request_id] = trio.CancelScope()

        async def run() -> None:
            try:
                with scope:
                    await trio.lowlevel.checkpoint_if_cancelled()
                    if call.answer.continued_by == request_id:
                        await self._settle(call, request_id)
                    if not call.answer.is_candidate(request_id):
                        await trio.sleep_forever()
                    await running
            finally:
                running.close()
                if leg.trace is not None:
                    leg.trace.end(leg.code, call.answer.continued_by == request_id)
                del self.legs[role, request_id]
                call.leg_ended(role, request_id)

        call.nursery.start_soon(run)

    async def _settle(self, call: Call, request_id: RequestId) -> None:
        """Return if this attempt may continue the answer. If not, the answer has ended, and its legs are not sent."""
        code = await call.settle(request_id)
        if code is not None:
            self.put(self.port, AnswerEnded(call.number, code))
            await trio.sleep_forever()


def ignore(engine: str) -> None:
    pass
