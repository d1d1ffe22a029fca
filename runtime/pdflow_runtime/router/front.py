"""The router's process: `python -m pdflow_runtime.router.front FILE`.

Its first line on stdout is its URL. Engines report to it (`reports.py`). With --child it reads from stdin as well which
are up and which are gone (a line of JSON for each, `addresses.py`), writes the operator's orders to stdout, and ends
when stdin does. It then accepts connections at the supervisor's sockets (--listener), after the supervisor has
reported all engines: the sockets and their waiting clients outlive this process. With serve.cluster_port, engines and
operators use that port, with certificates of the cluster, and /admin is refused at the other one. SIGTERM drains the
router: it takes no new connections, and ends with the last answer that has begun.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from functools import partial
from typing import Final

import msgspec
import trio

from pdflow.scenario.schema.scenario import ResolvedScenario
from pdflow_runtime.build import LiveBuilder, engines_of
from pdflow_runtime.http.ended import EndedRequest
from pdflow_runtime.http.errors import OpenAIError
from pdflow_runtime.http.messages import Headers, HttpRequest
from pdflow_runtime.http.openai.chat import ChatRequest, read_chat
from pdflow_runtime.http.openai.completion import CompletionRequest, read_completion
from pdflow_runtime.http.openai.fields import Fields
from pdflow_runtime.http.openai.sampling import AnswerOptions
from pdflow_runtime.http.responder import Responder
from pdflow_runtime.http.server import Server, serve_http
from pdflow_runtime.nodes.kv_params import Coordinates
from pdflow_runtime.nodes.models import open_prompts
from pdflow_runtime.observe.access_log import AccessLog, logged
from pdflow_runtime.observe.metrics import CONTENT_TYPE
from pdflow_runtime.observe.record import Record
from pdflow_runtime.observe.spans import spans_of
from pdflow_runtime.process.addresses import (
    AllReported,
    DrainOrder,
    Order,
    StartOrder,
    is_loopback,
    read_news,
    url_of,
)
from pdflow_runtime.process.collector import collect_rarely
from pdflow_runtime.process.component import arguments, record_of, run_component
from pdflow_runtime.process.malloc import keep_returning, limit_heap
from pdflow_runtime.process.processes import drain_on_signal, read_stdin
from pdflow_runtime.process.reports import ROUTER
from pdflow_runtime.process.router_sockets import RouterSockets, cluster_limits_of, inherited, limits_of, opened
from pdflow_runtime.router.admin import Admin
from pdflow_runtime.router.body_reader import BodyReader
from pdflow_runtime.router.call import Call, encoded_prompt
from pdflow_runtime.router.call_record import CallRecord, of_several
from pdflow_runtime.router.choices import Several
from pdflow_runtime.router.cluster_metrics import ClusterMetrics
from pdflow_runtime.router.model_api import ModelApi
from pdflow_runtime.router.prompts import Prompts
from pdflow_runtime.router.request_traces import RequestTrace, RequestTraces, trace_of, without_trace
from pdflow_runtime.router.router_node import LiveRouterNode
from pdflow_runtime.router.routing import SESSION, governed_of, seats_of, session_of
from pdflow_runtime.router.tokenizer_pool import TokenizerPool
from pdflow_runtime.security.api_keys import CHALLENGE, ApiKeys, api_keys_of, needs_key
from pdflow_runtime.security.client_tls import client_tls_of
from pdflow_runtime.security.host_header import HostCheck
from pdflow_runtime.security.reloaded import Reloaded
from pdflow_runtime.security.secret import local_secret, secret_beyond_loopback, secret_of
from pdflow_runtime.security.signed import Gate, Signer
from pdflow_runtime.security.tls import Tls, cluster_client, tls_of
from pdflow_runtime.store.build import stores_of
from pdflow_runtime.tls_socket import TlsNow
from pdflow_runtime.transports.named import transport_named

log = logging.getLogger(__name__)

LATER_S: Final = 5.0
"""Time after a request's deadline for an engine, which keeps the deadline itself, to answer."""
FILES_PER_CHOICE: Final = 4
"""A pair of sockets, and those of the two legs."""
CHOICES: Final = 1024
"""Answers at once to requests for several, where descriptors are plenty."""
FORWARDED: Final = (b"traceparent", b"tracestate", SESSION)
"""Headers of a client that go with every leg."""


class Front:
    """The router's HTTP API: that of clients, and behind the gate that of operators. Called as a function, it answers
    the requests at the port for clients."""

    def __init__(
        self, node: LiveRouterNode, prompts: Prompts, admin: Admin, gate: Gate | None, hosts: HostCheck | None = None
    ) -> None:
        self.node: Final = node
        self.prompts: Final = prompts
        self.pool: Final = TokenizerPool()
        self.bodies: Final = BodyReader(prompts)
        self.model_api: Final = ModelApi(prompts, self.pool, self.bodies)
        self.admin: Final = admin
        self.cluster_metrics: Final = ClusterMetrics(admin)
        self.gate: Final = gate
        """Authenticates operators; None: there is no operator's API over HTTP."""
        self.hosts: Final = hosts or HostCheck()
        """Refuses requests by names that are not the router's."""
        self.checks_every_host = False
        """Whether every request is checked; else those of operators are."""
        self.access_log: AccessLog | None = None
        self.keys: Reloaded[ApiKeys] | None = None
        """The API keys of clients; None: clients need none."""
        self.choice_slots: Final = trio.CapacityLimiter(CHOICES)
        """Of single answers to requests for several."""
        self.traces: RequestTraces | None = None
        self.cluster_port: int | None = None
        """The port at which requests to /admin are answered; None: at that for clients."""

    async def __call__(self, request: HttpRequest, responder: Responder) -> None:
        await self._respond(request, responder, self.cluster_port)

    async def at_cluster_port(self, request: HttpRequest, responder: Responder) -> None:
        """Answer a request at the cluster port."""
        await self._respond(request, responder, None)

    async def _respond(self, request: HttpRequest, responder: Responder, operators_at: int | None) -> None:
        """Answer a request. Args: `operators_at`, the port to which operators are referred; None: they are answered."""
        if self.traces is not None:
            responder.details = self.traces.begin(request, responder.begun_ns)
        try:
            if operators_at is not None and request.path.startswith("/admin/"):
                raise referral(operators_at)
            await self._answer(request, responder)
        except OpenAIError as error:
            headers = (*error.headers, CHALLENGE) if error.status == 401 else error.headers
            await responder.reply(error.status, headers, error.body())

    async def _answer(self, request: HttpRequest, responder: Responder) -> None:
        if self.checks_every_host or request.path.startswith("/admin/"):
            self.hosts.check(request)
        if self.keys is not None and needs_key(request.path):
            responder.key_name = self.keys.current().name_of(request)
        # The responder leaves the body of an answer to HEAD out (RFC 9110 9.3.2).
        method = "GET" if request.method == "HEAD" else request.method
        match method, request.path:
            case "POST", "/v1/completions":
                asked = await self.bodies.read(request.body, read_completion)
                prompts = await self.pool.run(len(request.body), lambda: self.prompts.of_prompts(asked.prompts))
                await self._complete(request, asked, prompts, responder)
            case "POST", "/v1/chat/completions":
                chat = await self.bodies.read(request.body, read_chat)
                prompts = await self.pool.run(len(request.body), lambda: [self.prompts.of_chat(chat)])
                await self._complete(request, chat, prompts, responder)
            case "GET", "/metrics":
                await responder.reply(200, ((b"content-type", CONTENT_TYPE),), self.node.meter.text())
            case "GET", "/metrics/cluster":
                self._gate(request.path).check_reader(request)
                await responder.reply(200, ((b"content-type", CONTENT_TYPE),), await self.cluster_metrics.text())
            case _, path if path.startswith("/admin/"):
                self._gate("/admin").check(request)
                await self.admin(msgspec.structs.replace(request, method=method), responder)
            case "GET", "/health/live":
                await responder.reply(200)
            case "GET", "/health" | "/health/ready" | "/ping":
                await responder.reply(200 if self.healthy() else 503)
            case _:
                if not await self.model_api.answers(method, request, responder):
                    raise OpenAIError(404, f"unknown path: {request.method} {request.path}")

    def _gate(self, path: str) -> Gate:
        """Return the gate of a path that is the operators'. OpenAIError if there is none."""
        if self.gate is None:
            problem = "is disabled: the router listens beyond loopback without a secret (docs/hosts.md)"
            raise OpenAIError(403, f"{path} {problem}")
        return self.gate

    async def _complete(
        self,
        request: HttpRequest,
        asked: CompletionRequest | ChatRequest,
        prompts: list[list[int]],
        responder: Responder,
    ) -> None:
        self.prompts.check_model(asked.model)
        self.prompts.check_token_ids(asked.asked)
        prompts = [self.prompts.truncated(tokens, asked.asked) for tokens in prompts]
        for tokens in prompts:
            self.prompts.check_length(len(tokens), asked.asked.max_tokens or 1)
        if len(prompts) * asked.asked.n > 1:
            await self._answer_several(request, asked, prompts, responder)
            return
        named = request.header(b"x-request-id")
        answered = () if named is None else ((b"x-request-id", named),)
        trace = trace_at(responder)
        call = self._call(request, asked.asked, asked.fields, prompts[0], responder, trace, answered)
        responder.details = call.record
        await self.node.serve(call)

    async def _answer_several(
        self,
        request: HttpRequest,
        asked: CompletionRequest | ChatRequest,
        prompts: list[list[int]],
        responder: Responder,
    ) -> None:
        """Answer a request for several answers."""
        records: list[CallRecord] = []
        trace = trace_at(responder)
        encoded = {id(prompt): encoded_prompt(prompt) for prompt in prompts}
        longest = max(len(bytes(prompt)) for prompt in encoded.values())

        async def serve(fields: Fields, prompt: list[int], to: Responder) -> None:
            call = self._call(request, asked.asked, fields, prompt, to, trace, encoded=encoded[id(prompt)])
            records.append(call.record)
            await self.node.serve(call)

        try:
            await Several(serve, self.choice_slots, responder, longest).answer(asked.fields, prompts, asked.asked)
        finally:
            if records:
                responder.details = of_several(records)

    def _call(
        self,
        request: HttpRequest,
        asked: AnswerOptions,
        fields: Fields,
        prompt: list[int],
        responder: Responder,
        trace: RequestTrace | None,
        answered: Headers = (),
        encoded: msgspec.Raw | None = None,
    ) -> Call:
        """Return the call for one answer."""
        forwarded = tuple(header for header in request.headers if header[0] in FORWARDED)
        call = Call(
            request.path,
            fields,
            prompt,
            headers=forwarded if trace is None else without_trace(forwarded),
            answered=answered,
            responder=responder,
            session=session_of(request, fields),
            one_token=asked.max_tokens == 1,
            prompt_alone=asked.max_tokens == 0 or asked.scores_prompt,
            resumes=self.node.router.resumes and self.node.router.max_attempts > 1,
            begun_ns=responder.begun_ns,
            intervals=self.node.meter.intervals,
            encoded=encoded,
        )
        call.trace = call.record.trace = trace
        return call

    def ended(self, request: EndedRequest) -> None:
        """Record a request that has been answered or refused (`http/ended.py`)."""
        if request.status >= 400 and not isinstance(request.details, CallRecord):
            self.node.meter.refused(request.status)
        if self.traces is not None and (trace := trace_of(request)) is not None:
            trace.end(request)
        if self.access_log is not None:
            self.access_log.add(request)

    def healthy(self) -> bool:
        """True if an engine computes prompts, and, where engines do not do both, another decodes; with a store, all its
        nodes must be up, too."""
        node, members = self.node, self.node.members
        if None in members.stores.values():
            return False
        return all(any(members.is_up(info.engine) for info in infos) for infos in (node.prefill, node.decode) if infos)


def referral(cluster_port: int) -> OpenAIError:
    """Return the refusal of an operator's or an engine's request at the port for clients."""
    return OpenAIError(
        403,
        f"/admin is answered at the cluster port {cluster_port} only (serve.cluster_port), to clients with a "
        "certificate of the cluster's authority: use --cert, --key and --ca of pdflow top, --cert, --key and --cacert "
        "of curl; serve.router must name that port",
        code="forbidden",
    )


def trace_at(responder: Responder) -> RequestTrace | None:
    """Return the spans of the request that this responder answers, if it has any."""
    return responder.details if isinstance(responder.details, RequestTrace) else None


async def front(scenario: ResolvedScenario, child: bool, record: Record, descriptors: list[int]) -> None:
    """Make the router, and serve until drained or cancelled. Args: `descriptors`, of inherited sockets that listen at
    the router's addresses; without any, they are made."""
    serve_config = scenario.serve
    secret = (secret_of(scenario) or local_secret()) if child else secret_beyond_loopback(scenario, "host")
    hosts = HostCheck((serve_config.host, *serve_config.host_names))
    gate = None if secret is None and not is_loopback(serve_config.host) else Gate(secret, ROUTER, hosts=hosts)
    builder = LiveBuilder(scenario, transport_named(serve_config.transport))
    prefill, decode = ([builder.info_of(name) for name in seats_of(scenario, role)] for role in ("prefill", "decode"))
    cluster_tls = tls_of(scenario)
    client, prompts = cluster_client(cluster_tls), open_prompts(scenario)
    node = LiveRouterNode(
        governed_of(builder),
        prefill,
        decode,
        scenario.transfer.method,
        client,
        leg_timeout_s=scenario.transfer.deadline_s + LATER_S,
        signer=Signer(secret),
        stores=stores_of(scenario),
        returns_first_token=scenario.router.first_token == "prefill",
        model=prompts.model,
    )
    named = engines_of(scenario.pools)
    spares = [name for name in node.members.seats if name not in named]
    app = Front(node, prompts, Admin(node, spares, request_start if child else None), gate, hosts)
    app.checks_every_host = is_loopback(serve_config.host)
    app.keys, tls = api_keys_of(scenario), client_tls_of(scenario)
    if (spans := spans_of(scenario, ROUTER, follows=False)) is not None:
        app.traces = RequestTraces(spans, prompts.model)
    sockets = inherited(descriptors) if descriptors else opened(scenario)
    app.cluster_port = sockets.cluster_port
    try:
        dropped = node.meter.log_lines_dropped.inc
        with logged(serve_config.access_log, prompts.model, dropped) as app.access_log, record.of(node, scenario, 0):
            await serve(node, app, sockets, scenario, child, None if tls is None else tls.current, cluster_tls)
    finally:
        client.close()


def request_start(engine: str) -> None:
    """Order the supervisor to start the engine."""
    report_order(StartOrder(engine))


def report_order(order: Order) -> None:
    """Write the order to stdout, for the supervisor."""
    sys.stdout.write(msgspec.json.encode(order).decode() + "\n")
    sys.stdout.flush()


async def serve(
    node: LiveRouterNode,
    app: Front,
    sockets: RouterSockets,
    scenario: ResolvedScenario,
    child: bool,
    tls: TlsNow | None,
    cluster_tls: Tls | None,
) -> None:
    """Serve until drained or cancelled. Args: `tls` of clients, and `cluster_tls` of the cluster."""
    serve_config = scenario.serve
    async with trio.open_nursery() as nursery:
        scope = nursery.cancel_scope
        nursery.start_soon(node.run)
        nursery.start_soon(node.checks.run)
        nursery.start_soon(app.admin.run)
        nursery.start_soon(keep_returning)
        if app.traces is not None:
            nursery.start_soon(app.traces.spans.run)
        if child:
            known, removed = trio.Event(), list[str]()

            def on_line(line: bytes) -> None:
                match read_news(line):
                    case AllReported():
                        app.admin.remove_again(removed)
                        known.set()
                    case DrainOrder() as order:
                        node.members.apply_order(order)
                        if order.removed:
                            removed.append(order.engine)
                    case news:
                        node.members.apply_report(news)

            nursery.start_soon(read_stdin, scope, on_line)
            await known.wait()
        async with trio.open_nursery() as serving:
            limits = limits_of(scenario, app.prompts.body_bytes)
            app.choice_slots.total_tokens = max(1, min(CHOICES, limits.connections // FILES_PER_CHOICE))
            for_clients = partial(serve_http, sockets.clients, app, limits, tls=tls)
            servers: list[Server] = [await serving.start(partial(for_clients, ended=app.ended))]
            if sockets.cluster is not None and cluster_tls is not None:
                inside = cluster_limits_of(limits)
                at_cluster = partial(
                    serve_http, sockets.cluster, app.at_cluster_port, inside, tls=cluster_tls.accepting
                )
                servers.append(await serving.start(partial(at_cluster, ended=app.ended)))
                at = url_of(Coordinates(serve_config.host, servers[-1].port), tls=True)
                log.info("engines and operators connect to %s, with a certificate of serve.tls_ca", at)
            nursery.start_soon(drain_on_signal, partial(drain, servers), serve_config.drain_s, scope)
            sys.stdout.write(f"{url_of(Coordinates(serve_config.host, sockets.port), tls is not None)}\n")
            sys.stdout.flush()
            if child:
                node.members.ordered = report_order  # the first line on stdout is the URL
        scope.cancel()


def drain(servers: Sequence[Server]) -> None:
    for server in servers:
        server.drain()


def main(args: Sequence[str] | None = None) -> int:
    parser = arguments("pdflow_runtime.router.front", __doc__)
    parser.add_argument(
        "--listener",
        type=int,
        action="append",
        default=[],
        metavar="FD",
        dest="listeners",
        help="accept connections at this inherited socket; a second one is that of the cluster port",
    )
    asked = parser.parse_args(args)
    limit_heap()
    collect_rarely()
    return run_component(
        asked, ROUTER, lambda scenario: front(scenario, asked.child, record_of(asked), asked.listeners)
    )


if __name__ == "__main__":
    sys.exit(main())
