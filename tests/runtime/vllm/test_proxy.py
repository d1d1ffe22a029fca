"""The proxy in front of vLLM: both legs of a request, in turn, between stub instances."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import attrs
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from pdflow_runtime.http.messages import EVENT_STREAM, JSON, HttpRequest
from pdflow_runtime.http.responder import Responder
from pdflow_runtime.vllm.legs import MooncakeLegs, NixlLegs, TransferLegs, VllmInstance, moves_kv, prefill_body
from pdflow_runtime.vllm.proxy import VllmProxy, instance_at, main
from tests.runtime.http.world import LOCAL, response_to, serving, until

PARAMS = {"do_remote_prefill": True, "remote_block_ids": [[8, 9]], "remote_engine_id": "p"}
ASKED = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 3, "min_tokens": 2, "stream": True, "stream_options": {}}


@attrs.define(eq=False)
class StubInstance:
    """An instance of vLLM: answers a request with its name, or a stream with a token for each of `gate`."""

    name: str
    params: Any = None
    """The kv_transfer_params of its answers."""
    status: int = 200
    holds: bool = False
    """It keeps each request open until its client disconnects."""
    ids: dict[str, Any] = attrs.field(factory=dict)
    """What its bootstrap server answers."""
    bodies: list[dict[str, Any]] = attrs.field(factory=list)
    headers: list[dict[bytes, bytes]] = attrs.field(factory=list)
    disconnected: int = 0
    next_token: trio.Semaphore = attrs.field(factory=lambda: trio.Semaphore(100))
    at: VllmInstance = attrs.field(default=VllmInstance("", 0))

    async def __call__(self, request: HttpRequest, responder: Responder) -> None:
        if request.path == "/query":
            await responder.reply(200, (JSON,), json.dumps(self.ids).encode())
            return
        if request.method == "GET":
            await responder.reply(self.status, (), self.name.encode())
            return
        body = json.loads(request.body)
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        if self.holds:
            try:
                await trio.sleep_forever()
            finally:
                self.disconnected += 1
        if self.status != 200:
            await responder.reply(self.status, (JSON,), b'{"error": "of ' + self.name.encode() + b'"}')
        elif body.get("stream"):
            await responder.begin(200, (EVENT_STREAM,))
            for token in range(body["max_tokens"]):
                await self.next_token.acquire()
                await responder.send(b"data: %d\n\n" % token)
            await responder.send(b"data: [DONE]\n\n")
            await responder.end()
        else:
            answer = {"of": self.name, "kv_transfer_params": self.params}
            await responder.reply(200, (JSON,), json.dumps(answer).encode())


@attrs.frozen
class ProxyBed:
    port: int
    prefill: Sequence[StubInstance]
    decode: Sequence[StubInstance]

    def request(self, body: Any = ASKED, path: str = "/v1/completions", headers: bytes = b"") -> bytes:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = b"POST %b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n%bContent-Length: %d\r\n\r\n"
        return head % (path.encode(), headers, len(data)) + data

    async def ask(self, body: Any = ASKED, **options: Any) -> tuple[int, bytes]:
        """Return the status and the answer's bytes behind the head."""
        return _split(await response_to(self.port, self.request(body, **options)))

    async def get(self, path: str) -> tuple[int, bytes]:
        head = f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        return _split(await response_to(self.port, head.encode()))


def _split(answer: bytes) -> tuple[int, bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


@asynccontextmanager
async def proxied(
    prefill: Sequence[StubInstance], decode: Sequence[StubInstance], mooncake: bool = False
) -> AsyncIterator[ProxyBed]:
    async with AsyncExitStack() as stack:
        for stub in (*prefill, *decode):
            server = await stack.enter_async_context(serving(stub))
            stub.at = VllmInstance(LOCAL, server.port)
        legs: TransferLegs = MooncakeLegs({stub.at: stub.at for stub in prefill}) if mooncake else NixlLegs()
        proxy = VllmProxy([stub.at for stub in prefill], [stub.at for stub in decode], legs)
        server = await stack.enter_async_context(serving(proxy))
        yield ProxyBed(server.port, prefill, decode)
        proxy.client.close()


def one_pair(**of_p: Any) -> tuple[list[StubInstance], list[StubInstance]]:
    return [StubInstance("p", params=PARAMS, **of_p)], [StubInstance("d")]


@pytest.mark.trio
async def test_the_decode_leg_has_the_parameters_that_the_prefill_leg_returned() -> None:
    async with proxied(*one_pair()) as bed:
        status, _ = await bed.ask()
    (p,), (d,) = bed.prefill, bed.decode
    assert status == 200
    assert p.bodies == [
        {
            "model": "m",
            "prompt": [1, 2, 3],
            "max_tokens": 1,
            "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
        }
    ]
    assert d.bodies == [ASKED | {"kv_transfer_params": PARAMS}]


@pytest.mark.trio
async def test_both_legs_have_one_request_id_that_no_other_request_has() -> None:
    async with proxied(*one_pair()) as bed:
        for _ in range(2):
            await bed.ask(headers=b"X-Request-Id: mine\r\nAuthorization: Bearer k\r\n")
    (p,), (d,) = bed.prefill, bed.decode
    ids = [headers[b"x-request-id"] for headers in (*p.headers, *d.headers)]
    assert ids[:2] == ids[2:]
    assert len({*ids, b"mine"}) == 3
    assert {headers[b"authorization"] for headers in (*p.headers, *d.headers)} == {b"Bearer k"}


@pytest.mark.trio
async def test_each_token_reaches_the_client_before_the_next_is_generated() -> None:
    prefill, decode = one_pair()
    decode[0].next_token = trio.Semaphore(0)
    async with proxied(prefill, decode) as bed:
        stream = await trio.open_tcp_stream(LOCAL, bed.port)
        async with stream:
            await stream.send_all(bed.request())
            for token in range(2):
                decode[0].next_token.release()
                got = await until(stream, b"data: %d\n\n\r\n" % token)
                assert got.count(b"data: ") == 1
            decode[0].next_token.release()
            assert (await until(stream, b"\r\n0\r\n\r\n")).split(b"\n\n")[0].endswith(b"data: 2")


@pytest.mark.trio
async def test_instances_are_taken_in_turn() -> None:
    prefill = [StubInstance(f"p{n}", params=PARAMS) for n in range(2)]
    decode = [StubInstance(f"d{n}") for n in range(3)]
    async with proxied(prefill, decode) as bed:
        answers = [json.loads((await bed.ask(ASKED | {"stream": False}))[1])["of"] for _ in range(6)]
    assert answers == ["d0", "d1", "d2"] * 2
    assert [len(stub.bodies) for stub in prefill] == [3, 3]


@pytest.mark.trio
async def test_without_prefill_instances_a_request_is_passed_on_as_it_came() -> None:
    async with proxied([], [StubInstance("x"), StubInstance("y")]) as bed:
        answers = [json.loads((await bed.ask(ASKED | {"stream": False}))[1])["of"] for _ in range(2)]
    assert answers == ["x", "y"]
    assert [stub.bodies for stub in bed.decode] == [[ASKED | {"stream": False}]] * 2


@pytest.mark.trio
async def test_an_error_of_the_prefill_leg_is_the_answer_and_no_decode_leg_begins() -> None:
    async with proxied(*one_pair(status=400)) as bed:
        status, body = await bed.ask()
    assert (status, body) == (400, b'{"error": "of p"}')
    assert bed.decode[0].bodies == []


@pytest.mark.trio
@pytest.mark.parametrize("answer", [None, "a text"])
async def test_a_prefill_leg_without_parameters_leaves_the_prompt_to_the_decode_instance(answer: Any) -> None:
    prefill, decode = one_pair()
    prefill[0].params = answer
    async with proxied(prefill, decode) as bed:
        assert (await bed.ask())[0] == 200
    assert decode[0].bodies == [ASKED]


@pytest.mark.trio
async def test_a_client_may_not_name_memory_of_an_instance() -> None:
    async with proxied([], [StubInstance("x")]) as bed:
        await bed.ask(ASKED | {"stream": False, "kv_transfer_params": PARAMS})
    assert bed.decode[0].bodies == [ASKED | {"stream": False}]


@pytest.mark.trio
async def test_an_instance_that_has_exited_is_a_502_that_names_it() -> None:
    async with serving(StubInstance("p")) as gone:
        pass
    proxy = VllmProxy([VllmInstance(LOCAL, gone.port)], [VllmInstance(LOCAL, gone.port)])
    async with serving(proxy) as server:
        status, body = await ProxyBed(server.port, [], []).ask()
    assert status == 502
    assert f"cannot connect to {LOCAL}:{gone.port}" in json.loads(body)["error"]["message"]


@pytest.mark.trio
@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_client_that_disconnects_ends_the_leg_that_is_open(leg: str) -> None:
    prefill, decode = one_pair()
    held = (prefill if leg == "prefill" else decode)[0]
    held.holds = True
    async with proxied(prefill, decode) as bed:
        stream = await trio.open_tcp_stream(LOCAL, bed.port)
        await stream.send_all(bed.request())
        with trio.fail_after(10):
            while not held.bodies:
                await trio.sleep(0.01)
            await stream.aclose()
            while not held.disconnected:
                await trio.sleep(0.01)
        await wait_all_tasks_blocked()
    assert len(decode[0].bodies) == (leg == "decode")


@pytest.mark.trio
async def test_health_is_that_of_all_instances() -> None:
    prefill, decode = one_pair()
    async with proxied(prefill, decode) as bed:
        assert (await bed.get("/health"))[0] == 200
        prefill[0].status = 503
        assert (await bed.get("/health"))[0] == 503


@pytest.mark.trio
async def test_models_are_those_of_a_decode_instance_and_other_paths_are_not_passed_on() -> None:
    async with proxied(*one_pair()) as bed:
        assert await bed.get("/v1/models") == (200, b"d")
        assert (await bed.get("/metrics"))[0] == 404
        assert (await bed.ask({}, path="/reset_prefix_cache"))[0] == 404


@pytest.mark.trio
@pytest.mark.parametrize("body", [b"{", b"[]", b"\xff", b"[" * 100_000])
async def test_a_body_that_is_no_object_is_a_400(body: bytes) -> None:
    async with proxied(*one_pair()) as bed:
        assert (await bed.ask(body))[0] == 400
    assert bed.prefill[0].bodies == []


@pytest.mark.trio
async def test_mooncakes_legs_have_one_transfer_id_and_ranks_are_taken_in_turn() -> None:
    prefill, decode = one_pair()
    prefill[0].ids = {"0": {"engine_id": "e0"}, "1": {"engine_id": "e1"}}
    async with proxied(prefill, decode, mooncake=True) as bed:
        for _ in range(2):
            assert (await bed.ask())[0] == 200
    at = prefill[0].at
    first = [body["kv_transfer_params"] for body in prefill[0].bodies]
    second = [body["kv_transfer_params"] for body in decode[0].bodies]
    assert [headers[b"x-data-parallel-rank"] for headers in prefill[0].headers] == [b"0", b"1"]
    assert [params["remote_engine_id"] for params in second] == ["e0", "e1"]
    assert {params["remote_bootstrap_addr"] for params in second} == {f"http://{LOCAL}:{at.port}"}
    assert [params["transfer_id"] for params in first] == [params["transfer_id"] for params in second]
    assert len({params["transfer_id"] for params in first}) == 2
    assert all(params["do_remote_decode"] and not params["do_remote_prefill"] for params in first)
    assert all(params["do_remote_prefill"] and not params["do_remote_decode"] for params in second)


@pytest.mark.trio
@pytest.mark.parametrize("ids", [{}, {"x": {}}, {"0": 1}])
async def test_a_bootstrap_server_without_engines_is_a_502(ids: Any) -> None:
    prefill, decode = one_pair(ids=ids)
    async with proxied(prefill, decode, mooncake=True) as bed:
        assert (await bed.ask())[0] == 502
    assert decode[0].bodies == []


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"prompt": "text"}, True),
        ({"prompt": [1, 2]}, True),
        ({"prompt": ["text"]}, True),
        ({"prompt": ["a", "b"]}, False),
        ({"prompt": [[1], [2]]}, False),
        ({"messages": []}, True),
        ({"prompt": "text", "n": 1}, True),
        ({"prompt": "text", "n": None}, True),
        ({"prompt": "text", "n": 2}, False),
        ({"prompt": "text", "best_of": 2}, False),
    ],
)
def test_kv_is_moved_of_one_prompt_to_one_sequence(body: dict[str, Any], expected: bool) -> None:
    assert moves_kv(body) is expected


def test_the_prefill_leg_of_a_chat_is_one_token() -> None:
    body = {"messages": [], "max_completion_tokens": 9, "stream": True}
    assert prefill_body(body) == {"messages": [], "max_completion_tokens": 1, "max_tokens": 1}


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "--prefill http://h:1",
        "--decode http://h:1",
        "--prefill http://h:1 --decode http://h:2 --aggregated http://h:3",
        "--prefill http://h:1 http://h:2 --decode http://h:3 --mooncake http://h:4",
        "--aggregated https://h:1",
        "--aggregated http://h",
        "--aggregated http://h:99999",
        "--aggregated http://h:1/path",
    ],
)
def test_arguments_that_name_no_cluster_are_refused(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments.split())
    assert ended.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_an_instance_is_an_address() -> None:
    assert instance_at("http://10.0.0.1:8100/") == VllmInstance("10.0.0.1", 8100)
    assert instance_at("http://[::1]:8100") == VllmInstance("::1", 8100)
