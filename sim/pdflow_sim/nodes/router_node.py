"""The router's node: its endpoint, and the HTTP hops between it and the engines. The client is where the router is.

Clients stream: a client has a token one hop after its engine has generated it. Tokens pass without the endpoint, which
asks for the first one only when an attempt fails (`pdflow/routing/failure.py`). So it is reported then, ahead of
whatever makes an attempt fail, and costs nothing otherwise. `pdflow/routing/answer.py` decides which attempt streams,
and to which decode legs P's first token is forwarded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from pdflow.protocol.messages import Code
from pdflow.protocol.values import EngineId, Instant, RequestId, Value
from pdflow.routing.answer import Answer, PieceUse
from pdflow.routing.attempt import Attempt
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
    ReportPrefill,
    RequestHangs,
    ResumeAnswer,
)
from pdflow.routing.events import (
    NO_SESSION,
    ClientGone,
    DecodeEnded,
    EngineLost,
    FirstTokenDelivered,
    PrefillAnswered,
    RequestArrived,
    RouterEvent,
)
from pdflow.routing.policy import Choice
from pdflow.routing.router import Router
from pdflow_sim.clients.first_tokens import FirstTokens
from pdflow_sim.clients.resumption import Resumptions
from pdflow_sim.nodes.api_servers import ApiServers
from pdflow_sim.nodes.node import SimNode, SimPort
from pdflow_sim.nodes.ports import NodePorts
from pdflow_sim.nodes.registry import NodeRegistry
from pdflow_sim.observe.run_metrics import request_of


class FirstTokenForwarded(Value, frozen=True, gc=False):
    """P has computed the answer's first token, which the engine that decodes this attempt goes on from."""

    engine: int
    request_id: RequestId


class BrokenConnections(NamedTuple):
    """The connections of the legs at one engine, which has died."""

    leg: str
    position: int
    begun: list[tuple[Attempt, Instant]]
    """Attempts of which the engine had generated a token, and when the first one."""


class SimRouterNode(SimNode):
    """The node of the router.

    Args:
    nodes: where legs are sent.
    api_servers: those of the engines, which everything that comes for a request passes.
    """

    def __init__(self, ports: NodePorts, nodes: NodeRegistry, router: Router, api_servers: ApiServers) -> None:
        super().__init__(ports.clock, ports.metrics)
        self.nodes = nodes
        self.prompts = ports.prompts
        self.prefill_tokens = ports.prefill_tokens
        self.link = ports.router
        self.link.receive = self.answered
        self.first_tokens = FirstTokens(self.link, nodes)
        self.http_ns = self.link.http_ns
        self.resumptions = Resumptions(self.metrics, self.prompts, self.http_ns, self.prefill_tokens > 0)
        self.on_reply: Callable[[Reply], None] | None = None
        """Called with the reply that ends a request for its client."""
        self.on_engine_left: Callable[[EngineId], None] | None = None
        """Called when an engine that is to leave has no leg left, nor KV that one needs by the router's count."""
        self.active: set[EngineId] = set()
        """Engines of which a leg has been answered, since they were last checked."""
        self.asked: set[EngineId] = set()
        """Engines that were asked at the last check whether they respond."""
        self.api_servers = api_servers
        self.endpoint = router
        self.port = SimPort(self, "router", router, 0)
        self.attempts = router.attempts
        self.by_request = router.by_request
        self.answers: dict[int, Answer] = {}
        """Answers of open requests that have a streaming attempt, or whose first token is P's."""
        self.first_follows = self.link.first_follows
        self.asks = type(router) is not Router or any(
            type(choice) is not Choice for choice in (router.prefill_choice, router.decode_choice)
        )
        """True if the endpoint looks at a request's length, prefix and session."""
        self.core.do = self.do = {
            DispatchPrefill: self.dispatch_prefill,
            DispatchDecode: self.dispatch_decode,
            DispatchAlone: self.dispatch_alone,
            AbortLeg: self.abort_leg,
            ReportPrefill: self.report_prefill,
            ResumeAnswer: self.resume_answer,
            Reply: self.reply,
            EngineLeft: self.engine_left,
            EngineSilent: self.engine_silent,
            AskEngine: self.ask_engine,
            EngineWatched: self.engine_watched,
            RequestHangs: lambda port, effect: self.metrics.count("request hung"),
        }
        self.arrivals: dict[type, Callable[[Any], None]] = {
            DispatchPrefill: self.prefill_arrived,
            DispatchDecode: self.decode_arrived,
            DispatchAlone: self.alone_arrived,
            AbortLeg: self.abort_arrived,
            ReportPrefill: self.report_arrived,
            FirstTokenForwarded: self.first_token_arrived,
        }
        """Handlers of what comes over HTTP to an engine, one hop after it was sent."""

    def arrive(self, request: int, prefill_only: bool) -> None:
        """Handle a client's request."""
        if not self.asks:
            self.feed(self.port, RequestArrived(request, prefill_only))
            return
        prompts, records = self.prompts, self.metrics.records
        tokens, sessions = records.input_tokens[request], records.sessions
        names = prompts.prefixes.get(request, ())[: tokens // prompts.block_tokens]
        session = sessions[request][0] if sessions else NO_SESSION
        self.feed(self.port, RequestArrived(request, prefill_only, tokens, names, session))

    def attempts_of(self, request: int) -> Sequence[Attempt]:
        """Return the attempts of a request that are under way."""
        attempt = self.by_request.get(request)
        return () if attempt is None else (attempt,)

    def hang_up(self, request: int, reason: str | None = None) -> None:
        """Cancel a request whose client goes away, for this reason, if it has not ended."""
        if request in self.by_request:
            self.feed(self.port, ClientGone(request))
            if reason is not None:
                self.metrics.records.reason[request] = reason

    def awaits(self, request_id: RequestId) -> bool:
        """True if this attempt is still under way: not given up, not answered."""
        return request_id in self.attempts

    def answered(self, event: RouterEvent) -> None:
        """Handle an engine's answer."""
        self.stamp(event)
        if type(event) is PrefillAnswered:
            if event.params is not None:
                self.active.add(event.params.prefill.engine)
            elif (attempt := self.attempts.get(event.request_id)) is not None and self.first_tokens.delivered(attempt):
                self.first_token_delivered(attempt, self.first_tokens.at(attempt))
        elif type(event) is DecodeEnded and event.code is Code.NONE and event.request_id in self.attempts:
            self.active.add(self.endpoint.decode[self.attempts[event.request_id].d].engine)
        if self.answers and isinstance(event, (DecodeEnded, PrefillAnswered)):
            self.leg_ended("decode" if isinstance(event, DecodeEnded) else "prefill", event.request_id)
        if self.first_follows and isinstance(event, DecodeEnded):
            # It may have been refused by an engine that is down, and then has not arrived there.
            self.first_follows.discard(event.request_id)
        self.feed(self.port, event)

    def stamp(self, event: RouterEvent) -> None:
        """Record what an engine's answer gives the client, if the router still waits for it."""
        decoded, metrics = self.link.decoded, self.metrics
        if type(event) is DecodeEnded or (type(event) is PrefillAnswered and event.request_id in decoded):
            found = decoded.pop(event.request_id, None)
            if found is not None and event.request_id in self.attempts:
                request = request_of(event.request_id)
                seq, at_ns, engine = found
                keeps_first = self.prefill_tokens > 0 or request in self.prompts.given
                metrics.stamp_tokens(request, seq, at_ns, engine, self.http_ns, keeps_first)
                if event.request_id in metrics.corrupted:
                    assert metrics.records.wrong_kv is not None
                    metrics.records.wrong_kv.add(request)
        elif self.prefill_tokens and type(event) is PrefillAnswered and event.params is not None:
            # With first_token = "prefill", the prefill leg's answer brings the client its first token.
            request = request_of(event.request_id)
            if self.first_token_received(event.request_id):
                metrics.stamp_first_token(request, self.clock.now)

    def answer_of(self, request: int) -> Answer:
        answer = self.answers.get(request)
        if answer is None:
            answer = self.answers[request] = Answer(True, self.prefill_tokens > 0)
        return answer

    def leg_ended(self, role: Literal["prefill", "decode"], request_id: RequestId) -> None:
        """Note that a leg has been answered or is aborted."""
        answer = self.answers.get(request_of(request_id))
        if answer is not None:
            answer.leg_ended(role, request_id)

    def first_token_received(self, request_id: RequestId) -> bool:
        """Handle P's first token. True if the client's answer starts with it."""
        attempt = self.attempts.get(request_id)
        if attempt is None:
            return False
        use = self.answer_of(attempt.request).first_token_received(request_id, attempt.prefill_only)
        if use is None:
            return False
        for leg in use.forward:
            forwarded = FirstTokenForwarded(self.attempts[leg].d, leg)
            self.to_engine("decode", request_of(leg), self.first_token_arrived, forwarded)
        for leg in use.cancel:
            self.cancel_leg(self.attempts[leg])
        if attempt.prefill_only:
            self.feed(self.port, FirstTokenDelivered(attempt.request, request_id))
        return True

    def cancel_leg(self, attempt: Attempt) -> None:
        """Cancel the leg of an attempt at the engine that computes the prompt too: the attempt fails."""
        request_id = attempt.request_id
        if attempt.d_open:
            self.abort_leg(self.port, AbortLeg("decode", attempt.d, request_id))
            self.feed(self.port, DecodeEnded(request_id, Code.CANCELLED))
        else:
            self.abort_leg(self.port, AbortLeg("prefill", attempt.p, request_id))
            self.feed(self.port, PrefillAnswered(request_id, None, Code.CANCELLED))

    def first_token_arrived(self, forwarded: FirstTokenForwarded) -> None:
        node = self.nodes.decodes[forwarded.engine]
        if node.ingress is None:
            node.first_token_known(forwarded.request_id)
        else:
            node.ingress(forwarded)

    def breaks(self, leg: str, position: int) -> None:
        """Break the connections to the engine there: seen one hop later, behind the tokens generated before."""
        now = self.clock.now
        made = [(attempt, self.first_tokens.at(attempt)) for attempt in self.at(leg, position)]
        begun = [(attempt, at) for attempt, at in made if 0 <= at < now]
        for attempt, _ in begun:
            source = self.first_tokens.source(attempt)
            assert source is not None
            self.first_tokens.lost[attempt.request_id] = source
        self.clock.call(self.http_ns, self.broken, BrokenConnections(leg, position, begun))

    def broken(self, connections: BrokenConnections) -> None:
        leg, position, begun = connections
        engines = self.endpoint.decode if leg == "decode" else self.endpoint.prefill
        for attempt, at in begun:
            if self.awaits(attempt.request_id):
                self.first_token_delivered(attempt, at)
            self.first_tokens.lost.pop(attempt.request_id)
        self.answered(EngineLost(engines[position].engine))

    def at(self, leg: str, position: int) -> list[Attempt]:
        """Return the attempts with such a leg at the engine there."""
        if leg == "decode":
            return [attempt for attempt in self.attempts.values() if attempt.d_open and attempt.d == position]
        return [attempt for attempt in self.attempts.values() if attempt.p_open and attempt.p == position]

    def first_token_delivered(self, attempt: Attempt, at: Instant) -> None:
        """Handle the first token of an attempt, which was generated at `at` and has come to the client."""
        if self.answer_of(attempt.request).piece_arrived(attempt.request_id) is PieceUse.FIRST:
            source = self.first_tokens.source(attempt)
            assert source is not None
            self.resumptions.streams(attempt.request, *source)
            self.feed(self.port, FirstTokenDelivered(attempt.request, attempt.request_id))

    def to_engine(self, leg: str, request: int, arrived: Callable[[Any], None], sent: Any) -> None:
        """Send something for a request to the engine that it names: over HTTP, and through its API server."""
        tokens = self.metrics.records.input_tokens[request] + self.prompts.given.get(request, 0)
        delay_ns = self.api_servers.delay_ns(leg, sent.engine, request, tokens)
        self.clock.call(delay_ns, arrived, sent)

    def dispatch_prefill(self, port: SimPort, effect: DispatchPrefill) -> None:
        records, request = self.metrics.records, effect.request
        records.attempts[request] += 1
        records.prefill_engine[request] = self.nodes.prefills[effect.engine].name
        if self.prefill_tokens and not effect.keeps:
            self.answer_of(effect.request).alone_dispatched(effect.request_id)
        self.to_engine("prefill", request, self.prefill_arrived, effect)

    def prefill_arrived(self, effect: DispatchPrefill) -> None:
        node = self.nodes.prefills[effect.engine]
        if node.ingress is None:
            node.accept(effect)
        else:
            node.ingress(effect)

    def dispatch_decode(self, port: SimPort, effect: DispatchDecode) -> None:
        if self.prefill_tokens and self.answer_of(effect.request).decode_dispatched(effect.request_id):
            self.first_follows.add(effect.request_id)
        self.to_engine("decode", effect.request, self.decode_arrived, effect)

    def decode_arrived(self, effect: DispatchDecode) -> None:
        node = self.nodes.decodes[effect.engine]
        if node.ingress is not None:
            node.ingress(effect)
            return
        self.metrics.records.decode_engine[effect.request] = node.name
        node.accept(effect)

    def dispatch_alone(self, port: SimPort, effect: DispatchAlone) -> None:
        records, request = self.metrics.records, effect.request
        records.attempts[request] += 1
        records.prefill_engine[request] = self.nodes.decodes[effect.engine].name
        if self.prefill_tokens:
            self.answer_of(effect.request).alone_dispatched(effect.request_id)
        self.to_engine("decode", request, self.alone_arrived, effect)

    def alone_arrived(self, effect: DispatchAlone) -> None:
        node = self.nodes.decodes[effect.engine]
        if node.ingress is not None:
            node.ingress(effect)
            return
        self.metrics.records.decode_engine[effect.request] = node.name
        node.accept_alone(effect)

    def abort_leg(self, port: SimPort, effect: AbortLeg) -> None:
        if self.answers:
            self.leg_ended(effect.role, effect.request_id)
        self.to_engine(effect.role, request_of(effect.request_id), self.abort_arrived, effect)

    def abort_arrived(self, effect: AbortLeg) -> None:
        if effect.role == "prefill":
            prefill = self.nodes.prefills[effect.engine]
            if prefill.ingress is None:
                prefill.abort(effect.request_id)
            else:
                prefill.ingress(effect)
            return
        decode = self.nodes.decodes[effect.engine]
        if decode.ingress is None:
            decode.abort(effect.request_id)
        else:
            decode.ingress(effect)

    def report_prefill(self, port: SimPort, effect: ReportPrefill) -> None:
        self.to_engine("decode", request_of(effect.request_id), self.report_arrived, effect)

    def report_arrived(self, effect: ReportPrefill) -> None:
        node = self.nodes.decodes[effect.engine]
        if node.ingress is None:
            node.report_prefill(effect)
        else:
            node.ingress(effect)

    def engine_left(self, port: SimPort, effect: EngineLeft) -> None:
        if self.on_engine_left is not None:
            self.on_engine_left(effect.engine)

    def engine_silent(self, port: SimPort, effect: EngineSilent) -> None:
        self.metrics.count("engine fell silent")
        if effect.abandoned:
            self.clock.call(0, self.abandon, effect.engine)

    def ask_engine(self, port: SimPort, effect: AskEngine) -> None:
        self.asked.add(effect.engine)

    def engine_watched(self, port: SimPort, effect: EngineWatched) -> None:
        if effect.state == "stalled":
            self.metrics.count("engine stalled")

    def abandon(self, engine: EngineId) -> None:
        """Break the connections to an engine that has fallen silent, behind the tokens that have come from it."""
        for leg, engines in (("prefill", self.endpoint.prefill), ("decode", self.endpoint.decode)):
            for position, info in enumerate(engines):
                if info.engine == engine:
                    for attempt in self.at(leg, position):
                        if self.first_tokens.delivered(attempt):
                            self.first_token_delivered(attempt, self.first_tokens.at(attempt))
        self.answered(EngineLost(engine))

    def resume_answer(self, port: SimPort, effect: ResumeAnswer) -> None:
        self.answers[effect.request].resume(effect.request_id)
        self.resumptions.resume(effect.request, self.clock.now)

    def reply(self, port: SimPort, effect: Reply) -> None:
        self.answers.pop(effect.request, None)
        self.resumptions.ended(effect.request)
        if self.on_reply is not None:
            self.on_reply(effect)
