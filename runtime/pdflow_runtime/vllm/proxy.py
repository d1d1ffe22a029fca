"""A proxy in front of vLLM instances: `python -m pdflow_runtime.vllm.proxy --prefill URL ... --decode URL ...`.

Of each request it sends the prompt to a prefill instance, as a request for one token, and then the request itself to a
decode instance, with the kv_transfer_params of the first answer: the two legs that vLLM's NIXL connectors and pdflow's
expect. With --aggregated it sends each request to one instance. Instances are taken in turn.

It has no queue, no retry and no measure of load. A request whose legs fail ends with the instance's own error, and an
instance that has exited keeps its turn. Disconnects, errors and framing are passed on as
by pdflow's router (`http/relay.py`).
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import socket
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

import attrs
import trio

from pdflow_runtime.http.client import HttpClient
from pdflow_runtime.http.errors import OpenAIError, UpstreamError
from pdflow_runtime.http.messages import JSON, Header, Headers, HttpRequest
from pdflow_runtime.http.relay import break_off, relay
from pdflow_runtime.http.responder import Responder
from pdflow_runtime.http.server import serve_http
from pdflow_runtime.http.sockets import listen, system_reason
from pdflow_runtime.nodes.kv_params import Coordinates
from pdflow_runtime.process.addresses import url_of
from pdflow_runtime.process.processes import drain_on_signal
from pdflow_runtime.vllm.legs import MooncakeLegs, NixlLegs, TransferLegs, VllmInstance, moves_kv, prefill_body

log = logging.getLogger(__name__)

GENERATE: Final = frozenset(("/v1/completions", "/v1/chat/completions"))
READ_ONLY: Final = frozenset(("/v1/models", "/version"))
"""Answered by the decode instances. Other paths of vLLM are for operators, and are not passed on."""
FORWARDED: Final = frozenset((b"authorization", b"traceparent", b"tracestate"))
"""Headers of a client that go with both legs. Its X-Request-Id does not: NixlPushConnector matches the legs by that
header, and returns another request's KV for an id that is used twice."""
HEALTH_S: Final = 5.0
"""An instance that takes longer to answer /health counts as unhealthy."""
DRAIN_S: Final = 30.0


@attrs.define(eq=False)
class VllmProxy:
    """The handler of the proxy's requests. Without `prefill`, each of `decode` computes its prompts itself."""

    prefill: Sequence[VllmInstance]
    decode: Sequence[VllmInstance]
    legs: TransferLegs = attrs.field(factory=NixlLegs)
    client: HttpClient = attrs.field(factory=HttpClient)
    _prefill_turns: Iterator[VllmInstance] = attrs.field(init=False)
    _decode_turns: Iterator[VllmInstance] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._prefill_turns = itertools.cycle(self.prefill)
        self._decode_turns = itertools.cycle(self.decode)

    async def __call__(self, request: HttpRequest, responder: Responder) -> None:
        try:
            match request.method, request.path:
                case "POST", path if path in GENERATE:
                    await self._generate(request, responder)
                case "GET", path if path in READ_ONLY:
                    headers = _forwarded(request)
                    async with self._sent("GET", next(self._decode_turns), path, headers) as response:
                        await relay(response, responder)
                case "GET", "/health":
                    await responder.reply(200 if await self._all_healthy() else 503)
                case _:
                    raise OpenAIError(404, f"unknown path: {request.method} {request.path}")
        except UpstreamError as error:
            log.warning("%s %s: %s", request.method, request.path, error)
            await break_off(responder, OpenAIError(502, str(error)))
        except OpenAIError as error:
            await responder.reply(error.status, error.headers, error.body())

    async def _generate(self, request: HttpRequest, responder: Responder) -> None:
        body = _json_object(request.body)
        body.pop("kv_transfer_params", None)  # They name memory of other instances: a client may not set them.
        name = uuid.uuid4().hex
        headers = (JSON, (b"x-request-id", name.encode("ascii")), *_forwarded(request))
        if self.prefill and moves_kv(body):
            params = await self._prefill_leg(request, responder, body, name, headers)
            if responder.begun:
                return
            if params is not None:
                body["kv_transfer_params"] = params
        async with self._sent("POST", next(self._decode_turns), request.path, headers, body) as response:
            await relay(response, responder)

    async def _prefill_leg(
        self, request: HttpRequest, responder: Responder, body: Mapping[str, Any], name: str, headers: Headers
    ) -> Mapping[str, Any] | None:
        """Return the parameters of the decode leg; None if the instance returned none: D then computes the prompt. If
        the instance answers with an error, the client has it when this returns."""
        instance = next(self._prefill_turns)
        leg = await self.legs.begin(self.client, instance, name)
        asked = prefill_body(body) | {"kv_transfer_params": leg.params}
        async with self._sent("POST", instance, request.path, (*headers, *leg.headers), asked) as response:
            if response.status != 200:
                await relay(response, responder)
                return None
            return leg.decode_params(_json_object(await response.read()))

    def _sent(
        self,
        method: str,
        instance: VllmInstance,
        path: str,
        headers: Headers,
        body: Mapping[str, Any] | None = None,
    ) -> Any:
        data = b"" if body is None else json.dumps(body).encode()
        return self.client.request(method, instance.host, instance.port, path, headers, data)

    async def _all_healthy(self) -> bool:
        found: list[bool] = []

        async def ask(instance: VllmInstance) -> None:
            with trio.move_on_after(HEALTH_S):
                try:
                    async with self._sent("GET", instance, "/health", ()) as response:
                        found.append(response.status == 200)
                except UpstreamError:
                    found.append(False)

        instances = [*self.prefill, *self.decode]
        async with trio.open_nursery() as nursery:
            for instance in instances:
                nursery.start_soon(ask, instance)
        return sum(found) == len(instances)


def _forwarded(request: HttpRequest) -> tuple[Header, ...]:
    return tuple(header for header in request.headers if header[0] in FORWARDED)


def _json_object(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise OpenAIError(400, f"the body is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise OpenAIError(400, "the body must be a JSON object")
    return found


def instance_at(url: str) -> VllmInstance:
    """Return the instance at http://HOST:PORT. ArgumentTypeError for any other URL."""
    try:
        split = urlsplit(url)
        host, port = split.hostname, split.port
    except ValueError:
        host = port = None
    if not host or not port or split.scheme != "http" or split.path not in ("", "/") or split.query:
        raise argparse.ArgumentTypeError(f"{url!r} must be http://HOST:PORT")
    return VllmInstance(host, port)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m pdflow_runtime.vllm.proxy", description="Sends requests to instances of vLLM, in turn."
    )
    instances: dict[str, Any] = {"nargs": "+", "type": instance_at, "metavar": "URL", "default": []}
    parser.add_argument("--prefill", help="instances that compute prompts (kv_producer)", **instances)
    parser.add_argument("--decode", help="instances that generate tokens (kv_consumer)", **instances)
    parser.add_argument("--aggregated", help="instances that do both, without a KV connector", **instances)
    parser.add_argument(
        "--mooncake",
        help="the instances have MooncakeConnector; the bootstrap servers of the prefill instances, in their order",
        **instances,
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on; 0: any (default: %(default)s)")
    found = parser.parse_args(argv)
    if bool(found.prefill) != bool(found.decode) or bool(found.decode) == bool(found.aggregated):
        parser.error("give --prefill and --decode, or --aggregated")
    if found.mooncake and len(found.mooncake) != len(found.prefill):
        parser.error("--mooncake needs one URL for each of --prefill")
    return found


async def serve_proxy(proxy: VllmProxy, listener: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT, then end with the last open request."""
    async with trio.open_nursery() as outer:
        async with trio.open_nursery() as serving:
            server = await serving.start(serve_http, listener, proxy)
            outer.start_soon(drain_on_signal, server.drain, DRAIN_S, outer.cancel_scope)
        outer.cancel_scope.cancel()
    proxy.client.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. The first line on stdout is the URL."""
    asked = _arguments(argv)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    try:
        listener = listen(asked.host, asked.port)
    except OSError as error:
        log.error("cannot listen on %s:%s: %s", asked.host, asked.port, system_reason(error))
        return 2
    sys.stdout.write(url_of(Coordinates(asked.host, listener.getsockname()[1])) + "\n")
    sys.stdout.flush()
    legs = MooncakeLegs(dict(zip(asked.prefill, asked.mooncake, strict=True))) if asked.mooncake else NixlLegs()
    trio.run(serve_proxy, VllmProxy(asked.prefill, asked.decode or asked.aggregated, legs), listener)
    return 0


if __name__ == "__main__":
    sys.exit(main())
