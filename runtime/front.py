"""The router's process: `python -m runtime.front FILE`.

Its first line on stdout is its URL. With --child it hears on stdin which engines are up and which are gone (a line of
JSON for each, `places.py`), and ends when stdin does. SIGTERM drains it: it takes no new connections, and ends with the
last answer that has begun.
"""

from __future__ import annotations

import logging
import socket
import sys
from typing import Final

import trio

from pdflow.scenario.schema import Scenario
from runtime.admin import Admin
from runtime.build import Builder, engines_of
from runtime.call import Call
from runtime.choices import Several
from runtime.clock import wall_s
from runtime.http.client import HttpClient
from runtime.http.errors import OpenAIError
from runtime.http.messages import JSON, Request
from runtime.http.openai.chat import ChatRequest, read_chat
from runtime.http.openai.completion import CompletionRequest, read_completion
from runtime.http.openai.models import ModelCard, model_not_found, models_body
from runtime.http.responder import Responder
from runtime.http.server import serve_http
from runtime.http.sockets import listen
from runtime.kv_params import Coordinates
from runtime.meter import CONTENT_TYPE
from runtime.models import open_prompts
from runtime.part import arguments, record_of, run_part
from runtime.places import LOOPBACK, is_loopback, read_news
from runtime.processes import drain_on_signal, hear_stdin
from runtime.prompts import Prompts
from runtime.record import Record
from runtime.router_node import RouterNode
from runtime.routing import SESSION, router_of, session_of
from runtime.transports.named import transport_named

log = logging.getLogger(__name__)

LATER_S: Final = 5.0
"""What an engine may be late by that keeps a request's deadline itself."""
FORWARDED: Final = (b"traceparent", b"tracestate", SESSION)
"""Headers of a client that go with every leg."""


class Front:
    """What clients may ask of the cluster."""

    def __init__(self, node: RouterNode, prompts: Prompts, admits: bool) -> None:
        self.node: Final = node
        self.prompts: Final = prompts
        self.started_s: Final = wall_s()
        self.admin: Final = Admin(node)
        self.admits: Final = admits
        """Whoever can reach the router may run the cluster."""
        self.here: Coordinates
        """Where clients ask."""

    async def __call__(self, request: Request, responder: Responder) -> None:
        try:
            await self._answer(request, responder)
        except OpenAIError as error:
            await responder.reply(error.status, (JSON,), error.body())

    async def _answer(self, request: Request, responder: Responder) -> None:
        match request.method, request.path:
            case "POST", "/v1/completions":
                asked = read_completion(request.body)
                await self._complete(
                    request, asked, [self.prompts.of_prompt(said) for said in asked.prompts], responder
                )
            case "POST", "/v1/chat/completions":
                chat = read_chat(request.body)
                await self._complete(request, chat, [self.prompts.of_chat(chat)], responder)
            case "GET", "/metrics":
                await responder.reply(200, ((b"content-type", CONTENT_TYPE),), self.node.meter.text())
            case _, path if path.startswith("/admin/"):
                if not self.admits:
                    raise OpenAIError(403, "the router listens beyond this host, where nobody is asked who they are")
                await self.admin(request, responder)
            case "GET", "/v1/models":
                card = ModelCard(
                    id=self.prompts.model, created=self.started_s, max_model_len=self.prompts.context_tokens
                )
                await responder.reply(200, (JSON,), models_body([card]))
            case "GET", "/health":
                await responder.reply(200 if self.healthy() else 503)
            case _:
                raise OpenAIError(404, f"there is no {request.method} {request.path} here")

    async def _complete(
        self, request: Request, asked: CompletionRequest | ChatRequest, prompts: list[list[int]], responder: Responder
    ) -> None:
        if asked.model is not None and asked.model != self.prompts.model:
            raise model_not_found(asked.model)
        for tokens in prompts:
            self.prompts.check_length(len(tokens), asked.asked.max_tokens or 1)
        forwarded = tuple(header for header in request.headers if header[0] in FORWARDED)
        if len(prompts) * asked.asked.n > 1:
            several = Several(self.node.client, self.here, request.path, forwarded, responder)
            await several.answer(asked.fields, prompts, asked.asked)
            return
        named = request.header(b"x-request-id")
        answered = () if named is None else ((b"x-request-id", named),)
        session = session_of(request, asked.fields)
        await self.node.serve(Call(request.path, asked.fields, prompts[0], forwarded, answered, responder, session))

    def healthy(self) -> bool:
        """Whether somebody computes prompts, and somebody decodes."""
        up = self.node.places
        return all(any(info.engine in up for info in infos) for infos in (self.node.prefill, self.node.decode))


async def front(scenario: Scenario, child: bool, record: Record) -> None:
    """Serve, until drained or cancelled."""
    says = scenario.serve
    builder = Builder(scenario, transport_named(says.transport))
    prefill, decode = ([builder.info_of(name) for name in engines_of(scenario, role)] for role in ("prefill", "decode"))
    client = HttpClient()
    router = router_of(builder)
    patience_s = scenario.transfer.deadline_s + LATER_S
    node = RouterNode(router, prefill, decode, scenario.transfer.method, client, patience_s)
    app = Front(node, open_prompts(scenario), is_loopback(says.host))
    listener = listen(says.host, says.port)
    try:
        with record.of(node, scenario, 0):
            await serve(node, app, listener, scenario, child)
    finally:
        client.close()


async def serve(node: RouterNode, app: Front, listener: socket.socket, scenario: Scenario, child: bool) -> None:
    """Until drained or cancelled."""
    says = scenario.serve
    async with trio.open_nursery() as nursery:
        scope = nursery.cancel_scope
        nursery.start_soon(node.run)
        if child:
            nursery.start_soon(hear_stdin, scope, lambda line: node.hear(read_news(line)))
        async with trio.open_nursery() as serving:
            server = await serving.start(serve_http, listener, app)
            app.here = Coordinates(reached_at(says.host), server.port)
            nursery.start_soon(drain_on_signal, server.drain, says.drain_s, scope)
            sys.stdout.write(f"http://{says.host}:{server.port}\n")
            sys.stdout.flush()
        scope.cancel()


def reached_at(host: str) -> str:
    """Where one reaches oneself, listening there."""
    return {"0.0.0.0": LOOPBACK, "::": "::1"}.get(host, host)


def main() -> int:
    parser = arguments("runtime.front", __doc__)
    asked = parser.parse_args()
    return run_part(asked, "router", lambda scenario: front(scenario, asked.child, record_of(asked)))


if __name__ == "__main__":
    sys.exit(main())
