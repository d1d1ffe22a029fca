"""A middleware of vLLM's API server: `--middleware pdflow_runtime.vllm.middleware.CheckParams`.

It answers 400 to a request whose kv_transfer_params are wrong. The connector cannot: it learns of a request in
EngineCore, when the API server has accepted it, and has it computed without a transfer. And it answers 503 to
GET /health once the connector is broken, so that whatever restarts unhealthy instances restarts this one.

Checked are requests to PATHS with `do_remote_decode` or `do_remote_prefill`. The mode of the instance is not known
here: right is what push or pull would take. Passed on as they are: bodies of more than MOST_BYTES, which are not kept;
bodies that are no JSON, or no object, which vLLM answers itself; requests of any other kind. Of several API servers
(`--api-server-count`) any may be the one that learns of a broken connector, and none does with --disable-log-stats.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Final, TypeAlias

import msgspec

from pdflow.methods.params.errors import ParamsError
from pdflow.methods.params.parse import parse
from pdflow_runtime.nodes.kv_params import read_decode
from pdflow_runtime.vllm.health import BROKEN

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

PATHS: Final = frozenset(("/v1/completions", "/v1/chat/completions"))
MOST_BYTES: Final = 8 * 1024 * 1024
"""The largest body that is read before vLLM has it: a prompt of a million token ids. vLLM itself has no limit."""
FIELD: Final = "kv_transfer_params"


class CheckParams:
    """An ASGI application around vLLM's."""

    def __init__(self, app: App) -> None:
        self.app: Final = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        request = None
        if scope["type"] == "http":
            request = scope["method"], scope["path"].removeprefix(scope.get("root_path", ""))
        if request == ("GET", "/health") and BROKEN:
            why = "; ".join(f"engine {engine}: {text}" for engine, text in sorted(BROKEN.items()))
            await _answer(send, 503, f"pdflow's connector is broken until the instance restarts ({why})")
        elif request is not None and request[0] == "POST" and request[1] in PATHS:
            await self._checked(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _checked(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        messages, body = await _read(receive)
        error = None if body is None else error_of(body)
        if error is not None:
            await _answer(send, 400, str(error), error.field)
            return
        messages.reverse()

        async def receive_again() -> Message:
            return messages.pop() if messages else await receive()

        await self.app(scope, receive_again, send)


async def _read(receive: Receive) -> tuple[list[Message], bytes | None]:
    """Return the messages of a request so far, and its body; None for one that is too large, or did not come whole."""
    messages: list[Message] = []
    nbytes = 0
    while True:
        message = await receive()
        messages.append(message)
        nbytes += len(message.get("body", b""))
        if message["type"] != "http.request" or nbytes > MOST_BYTES:
            return messages, None
        if not message.get("more_body", False):
            return messages, b"".join(message.get("body", b"") for message in messages)


class _Body(msgspec.Struct):
    """Of a request's body, the fields that are checked. The others are skipped."""

    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")
    n: Any = None


_body: Final = msgspec.json.Decoder(_Body)


def error_of(body: bytes) -> ParamsError | None:
    """Return what is wrong with the kv_transfer_params in a request's body, if that is ours to say."""
    try:
        given = _body.decode(body)
        mapping = msgspec.json.decode(given.kv_transfer_params)
    except (msgspec.DecodeError, RecursionError):
        return None  # vLLM answers what is no JSON, and no object.
    if not isinstance(mapping, Mapping):
        return None
    if is_leg(mapping) and type(given.n) is int and given.n > 1:
        return ParamsError("n", f"is {given.n}", f"1 in a request with {FIELD}: a prompt has one decode leg")
    return wrong_params(mapping)


def is_leg(mapping: Mapping[str, Any]) -> bool:
    """Whether these are the parameters of a prefill leg or of a decode leg."""
    return bool(mapping.get("do_remote_decode") or mapping.get("do_remote_prefill"))


def wrong_params(mapping: Mapping[str, Any]) -> ParamsError | None:
    """Return what is wrong with the parameters of a prefill leg or of a decode leg; None for other objects."""
    try:
        if mapping.get("do_remote_decode"):
            parse("nixl-push", "prefill", mapping)
        elif mapping.get("do_remote_prefill"):
            read_decode("nixl-pull" if mapping.get("transfer_mode") == "pull" else "nixl-push", mapping)
    except ParamsError as error:
        return error.under(FIELD)
    return None


async def _answer(send: Send, status: int, message: str, field: str | None = None) -> None:
    """Send an error in the form of vLLM's own (`vllm.entrypoints.serve.engine.protocol.ErrorResponse`)."""
    kind = "BadRequestError" if status == 400 else "ServiceUnavailableError"
    body = json.dumps({"error": {"message": message, "type": kind, "param": field, "code": status}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
