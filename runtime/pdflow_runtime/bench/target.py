"""The server of a benchmark: from options to its address, whether it answers there, and the name of its model."""

from __future__ import annotations

import os
from typing import Final
from urllib.parse import urlsplit

import msgspec
import trio

from pdflow.errors import EXIT_BAD_INPUT, PdflowError
from pdflow.protocol.values import S
from pdflow_runtime.bench.answer import plain, refusal
from pdflow_runtime.bench.asked import AskedError, BenchOptions
from pdflow_runtime.bench.form import CHAT
from pdflow_runtime.bench.sender import ERROR_BYTES, RequestTarget
from pdflow_runtime.clock import now_ns
from pdflow_runtime.http.client import HttpClient
from pdflow_runtime.http.errors import UpstreamError
from pdflow_runtime.http.messages import JSON, Header

CHAT_BACKEND: Final = "openai-chat"
AGAIN_NS: Final = 1 * S
"""Time between two checks whether a server is up yet."""
API_KEY: Final = "OPENAI_API_KEY"
"""An environment variable, as in vLLM's benchmark."""


class NoServerError(PdflowError):
    """No server answers at the address that requests were to go to."""

    exit_code = EXIT_BAD_INPUT


class _Card(msgspec.Struct):
    id: str


class _ServedModels(msgspec.Struct):
    data: list[_Card]


def server_of(asked: BenchOptions) -> RequestTarget:
    """Return the server that the options name. Raises AskedError if they name none."""
    base = asked.base_url or f"http://{_bracketed(asked.host)}:{asked.port}"
    split = urlsplit(base)
    try:
        port = split.port or (443 if split.scheme == "https" else 80)
    except ValueError:
        port = 0
    if split.scheme not in ("http", "https") or not split.hostname or not port:
        raise AskedError(f"--base-url {base}: expected http://HOST:PORT or https://HOST:PORT")
    path = asked.endpoint or ("/v1/chat/completions" if asked.backend == CHAT_BACKEND else "/v1/completions")
    if asked.backend == CHAT_BACKEND and not path.rstrip("/").endswith(CHAT):
        raise AskedError(f"--endpoint {path}: expected a path that ends with {CHAT}, for --backend {CHAT_BACKEND}")
    headers = [JSON, *map(_header, asked.header)]
    if key := os.environ.get(API_KEY):
        headers.append((b"authorization", b"Bearer " + key.encode()))
    return RequestTarget(split.hostname, port, split.path.rstrip("/") + path, tuple(headers), split.scheme == "https")


async def model_of(client: HttpClient, server: RequestTarget, asked: BenchOptions) -> str:
    """Return the model name to ask for: the one given, or the first that the server lists. NoServerError if there is no
    answer."""
    models = server._replace(path=server.path.partition("/v1/")[0] + "/v1/models")
    until = now_ns() + round(asked.ready_check_timeout_sec * S)
    while True:
        try:
            return await _first_model(client, models, asked.model)
        except UpstreamError as error:
            if now_ns() + AGAIN_NS > until:
                hint = "`pdflow serve FILE` starts a server, --ready-check-timeout-sec waits for one"
                raise NoServerError(f"{models.url} does not answer: {error}; {hint}") from None
        await trio.sleep(AGAIN_NS / S)


async def _first_model(client: HttpClient, models: RequestTarget, given: str | None) -> str:
    host, port, path, headers, _ = models
    async with client.request("GET", host, port, path, headers) as response:
        body = await response.read(ERROR_BYTES)
        if given is not None:
            return given  # somebody answers, whatever they say
        if response.status != 200:
            raise NoServerError(f"{models.url}: {refusal(response.status, body)}; use --model NAME")
    try:
        cards = msgspec.json.decode(body, type=_ServedModels).data
    except (msgspec.DecodeError, RecursionError) as error:
        raise NoServerError(f"{models.url}: {plain(str(error))}; use --model NAME") from None
    if not cards:
        raise NoServerError(f"{models.url} names no model; use --model NAME")
    return cards[0].id


def _header(text: str) -> Header:
    name, equals, value = text.partition("=")
    if not equals or not name or any(ch in text for ch in "\r\n"):
        raise AskedError(f"--header {text}: expected KEY=VALUE")
    return name.strip().lower().encode(), value.strip().encode()


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
