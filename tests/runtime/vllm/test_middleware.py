"""What CheckParams answers itself, and that all else reaches vLLM as it came."""

from __future__ import annotations

import json
from collections.abc import Iterator, MutableMapping
from typing import Any

import attrs
import pytest

from pdflow.protocol.ids import EngineInfo, KvParams, LeaseWord, Shards
from pdflow_runtime.nodes.kv_params import Coordinates, decode_json, prefill_json
from pdflow_runtime.vllm import health
from pdflow_runtime.vllm.middleware import MOST_BYTES, CheckParams, Message, Receive, Send

PATHS = ("/v1/completions", "/v1/chat/completions")
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
ANSWERED = KvParams(EngineInfo("p", Shards(1, 1, 128)), "x1", "r1", 40, (3,), (LeaseWord(1, 2),), 11, 12)
AT = Coordinates("127.0.0.1", 5600, (("127.0.0.1", 5601),))
PUSH = decode_json(ANSWERED, AT, "nixl-push")
PULL = decode_json(ANSWERED, AT, "nixl-pull")


@pytest.fixture(autouse=True)
def _nothing_broken() -> Iterator[None]:
    yield
    health.BROKEN.clear()


@attrs.define
class Served:
    """vLLM's application: it reads the whole request, and answers in three pieces."""

    messages: list[Message] = attrs.field(factory=list)
    """What it has received."""

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        while True:
            self.messages.append(message := await receive())
            if message["type"] != "http.request" or not message.get("more_body"):
                break
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for number in range(3):
            await send({"type": "http.response.body", "body": b"%d" % number, "more_body": number < 2})

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)


@attrs.define
class Exchange:
    """One request through the middleware."""

    served: Served
    sent: list[Message]
    unread: list[Message]

    @property
    def status(self) -> int:
        status: int = self.sent[0]["status"]
        return status

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = json.loads(self.sent[1]["body"])["error"]
        return error

    @property
    def passed(self) -> bool:
        return [message.get("body") for message in self.sent] == [None, b"0", b"1", b"2"]


async def exchange(method: str, path: str, *messages: Message, root: str = "") -> Exchange:
    served = Served()
    unread, sent = list(messages), []

    async def receive() -> Message:
        return unread.pop(0) if unread else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "root_path": root}
    await CheckParams(served)(scope, receive, send)
    return Exchange(served, sent, unread)


def chunks(body: bytes, count: int = 1) -> list[Message]:
    size = max(1, -(-len(body) // count))
    pieces = [body[at : at + size] for at in range(0, len(body), size)] or [b""]
    return [
        {"type": "http.request", "body": piece, "more_body": number < len(pieces)}
        for number, piece in enumerate(pieces, 1)
    ]


async def post(params: object, path: str = PATHS[0], count: int = 1) -> Exchange:
    body = {"model": "tiny", "prompt": [1, 2, 3], "kv_transfer_params": params, "stream": True}
    result = await exchange("POST", path, *chunks(json.dumps(body).encode(), count))
    assert result.passed == (result.status == 200)
    assert not result.passed or json.loads(result.served.body) == body
    assert result.passed or not result.served.messages
    return result


@pytest.mark.trio
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("count", [1, 7])
@pytest.mark.parametrize("params", [None, PREFILL, prefill_json("x1", "nixl-push"), PUSH, PULL])
async def test_what_either_mode_sends_is_passed_on(path: str, count: int, params: object) -> None:
    assert (await post(params, path, count)).passed


@pytest.mark.trio
@pytest.mark.parametrize(
    "params", [{}, {"do_remote_prefill": False, "tp_size": "x"}, {"other": {"a": [1]}}, 3, [1], "x"]
)
async def test_what_is_no_leg_is_passed_on(params: object) -> None:
    """The parameters of other connectors; and what is no object at all, which vLLM refuses itself."""
    assert (await post(params)).passed


def without(key: str, mapping: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in mapping.items() if name != key}


@pytest.mark.trio
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("params", "field"),
    [
        (without("tp_size", PUSH), "tp_size"),
        (without("remote_request_id", PUSH), "remote_request_id"),
        (without("remote_engine_id", PULL), "remote_engine_id"),
        (without("remote_block_ids", PULL), "remote_block_ids"),
        (without("pdflow", PUSH), "pdflow"),
        (PUSH | {"tp_size": "1"}, "tp_size"),
        (PUSH | {"remote_port": 65_536}, "remote_port"),
        (PUSH | {"remote_block_ids": "all"}, "remote_block_ids"),
        (PUSH | {"do_remote_prefill": "yes"}, "do_remote_prefill"),
        (PUSH | {"pdflow": PUSH["pdflow"] | {"digset": 1}}, "pdflow"),
        (PUSH | {"transfer_mode": "both"}, "transfer_mode"),
        (PUSH | {"tp_size": 2}, "pdflow.ranks"),
        (PREFILL | {"do_remote_prefill": True}, "do_remote_prefill"),
        (PREFILL | {"pdflow": 3}, "pdflow"),
        (PREFILL | {"remote_host": "127.0.0.1"}, "remote_host"),
    ],
)
async def test_wrong_params_are_one_400(path: str, params: dict[str, Any], field: str) -> None:
    result = await post(params, path)
    assert result.status == 400
    assert result.error["param"] == f"kv_transfer_params.{field}"
    assert result.error["message"].startswith(f"kv_transfer_params.{field} ")
    assert (result.error["type"], result.error["code"]) == ("BadRequestError", 400)
    length = dict(result.sent[0]["headers"])[b"content-length"]
    assert int(length) == len(result.sent[1]["body"])


@pytest.mark.trio
@pytest.mark.parametrize(("n", "params", "status"), [(2, PUSH, 400), (2, PREFILL, 400), (1, PUSH, 200), (2, {}, 200)])
async def test_one_prompt_has_one_decode_leg(n: int, params: dict[str, Any], status: int) -> None:
    body = json.dumps({"prompt": "x", "n": n, "kv_transfer_params": params}).encode()
    result = await exchange("POST", PATHS[0], *chunks(body))
    assert result.passed == (status == 200)
    if status == 400:
        assert (result.status, result.error["param"]) == (400, "n")


@pytest.mark.trio
@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"\xff", b'{"kv_transfer_params": {"do_remote_prefill": tru}}', b"[" * 100_000]
)
async def test_what_is_no_json_is_vllms_to_answer(body: bytes) -> None:
    result = await exchange("POST", PATHS[0], *chunks(body))
    assert result.passed
    assert result.served.body == body


@pytest.mark.trio
async def test_a_large_body_is_neither_kept_nor_checked() -> None:
    """It is passed on as soon as it is too large, with what is still to come."""
    wrong = json.dumps({"kv_transfer_params": {"do_remote_prefill": True}, "prompt": "x" * (2 * MOST_BYTES)}).encode()
    messages = chunks(wrong, 64)
    taken_before = []

    async def app(scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        taken_before.append(64 - len(messages))
        got = b""
        while (message := await receive())["more_body"]:
            got += message["body"]
        assert got + message["body"] == wrong

    async def receive() -> Message:
        return messages.pop(0)

    async def send(_: Message) -> None:
        raise AssertionError("it answers nothing itself")

    await CheckParams(app)({"type": "http", "method": "POST", "path": PATHS[0]}, receive, send)
    assert taken_before == [32], "half of it is just too much"


@pytest.mark.trio
async def test_a_client_that_hangs_up_halfway_is_vllms_to_notice() -> None:
    first = {"type": "http.request", "body": b'{"kv_transfer_params"', "more_body": True}
    result = await exchange("POST", PATHS[0], first)
    assert [message["type"] for message in result.served.messages] == ["http.request", "http.disconnect"]


@pytest.mark.trio
async def test_a_disconnect_behind_the_body_comes_from_the_server() -> None:
    """What vLLM receives behind the body is the server's own: a client that hangs up during the answer."""
    seen = []

    async def app(scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        seen.extend([(await receive())["type"], (await receive())["type"]])

    messages = [*chunks(b"{}"), {"type": "http.disconnect"}]

    async def receive() -> Message:
        return messages.pop(0)

    async def send(_: Message) -> None:
        raise AssertionError

    await CheckParams(app)({"type": "http", "method": "POST", "path": PATHS[1]}, receive, send)
    assert seen == ["http.request", "http.disconnect"]


@pytest.mark.trio
@pytest.mark.parametrize(("method", "path"), [("GET", PATHS[0]), ("POST", "/v1/models"), ("POST", "/tokenize")])
async def test_other_requests_are_not_read(method: str, path: str) -> None:
    wrong = json.dumps({"kv_transfer_params": {"do_remote_prefill": True}}).encode()
    assert (await exchange(method, path, *chunks(wrong))).passed


@pytest.mark.trio
async def test_behind_a_root_path() -> None:
    wrong = json.dumps({"kv_transfer_params": {"do_remote_prefill": True}}).encode()
    assert (await exchange("POST", f"/api{PATHS[0]}", *chunks(wrong), root="/api")).status == 400


@pytest.mark.trio
async def test_other_connections_are_passed_on() -> None:
    """The server's start and end, and websockets."""
    seen = []

    async def app(scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        seen.append(scope["type"])

    async def receive() -> Message:
        raise AssertionError

    async def send(_: Message) -> None:
        raise AssertionError

    for kind in ("lifespan", "websocket"):
        await CheckParams(app)({"type": kind, "path": "/health"}, receive, send)
    assert seen == ["lifespan", "websocket"]


@pytest.mark.trio
async def test_health_is_vllms_unless_a_connector_is_broken() -> None:
    assert (await exchange("GET", "/health", *chunks(b""))).passed
    health.report(1, "KeyError: 'x'")
    result = await exchange("GET", "/health", *chunks(b""))
    assert result.status == 503
    assert "engine 1: KeyError: 'x'" in result.error["message"]
    assert result.error["code"] == 503
    assert (await exchange("GET", "/metrics", *chunks(b""))).passed
    assert (await post(PUSH)).passed, "requests are computed without transfers"
    health.report(1, "")
    assert (await exchange("GET", "/health", *chunks(b""))).passed
