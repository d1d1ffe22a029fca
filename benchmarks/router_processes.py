"""What router_speed.py measures with: a stub engine and our router, each a process that prints its port.

    python benchmarks/router_processes.py engine
    python benchmarks/router_processes.py router ENGINE_PORT [--pd]

The engine streams `max_tokens` events of about 200 bytes, one write each, `pace_ms` apart; what is not streamed is
answered at once with kv_transfer_params. GET /cpu of a router says how many nanoseconds of CPU its process has used.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = (
    '{"id":"cmpl-9f1c2d3e4b5a69788796a5b4c3d2e1f0","object":"text_completion","created":1700000000,"model":"stub",'
    '"choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":null}],"at":%d}'
)
KV_PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "9f1c2d3e-4b5a-6978-8796-a5b4c3d2e1f0",
    "remote_request_id": "cmpl-9f1c2d3e4b5a69788796a5b4c3d2e1f0",
    "remote_block_ids": list(range(64)),
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
}
PREFILLED = json.dumps(
    {"id": "cmpl-1", "object": "text_completion", "choices": [], "kv_transfer_params": KV_PARAMS}
).encode()


class Engine(asyncio.Protocol):
    """One connection to the stub: one request at a time."""

    def __init__(self) -> None:
        self.got = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.got += data
        head, found, body = self.got.partition(b"\r\n\r\n")
        if not found:
            return
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        if len(body) < length:
            return
        self.got = b""
        asked = json.loads(body)
        if not asked.get("stream"):
            self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: ")
            self.transport.write(b"%d\r\n\r\n%b" % (len(PREFILLED), PREFILLED))
            return
        self.transport.write(HEAD)
        self.stream(asked["max_tokens"], asked.get("pace_ms", 0) / 1e3, asyncio.get_running_loop().time())

    def stream(self, left: int, pace_s: float, at: float) -> None:
        loop = asyncio.get_running_loop()
        while left and not self.transport.is_closing():
            if pace_s and at > loop.time():
                loop.call_at(at, self.stream, left, pace_s, at)
                return
            event = b"data: %b\n\n" % (EVENT % time.monotonic_ns()).encode()
            self.transport.write(b"%x\r\n%b\r\n" % (len(event), event))
            left -= 1
            at += pace_s
        self.transport.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")


async def engine() -> None:
    server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def router(engine_port: int, pd: bool) -> None:
    """One leg, or two: a prefill leg whose answer goes into the decode leg. Requests are read as the router's are."""
    import msgspec
    import trio

    from pdflow_runtime.http.client import HttpClient
    from pdflow_runtime.http.messages import JSON, Header, HttpRequest
    from pdflow_runtime.http.openai.completion import read_completion
    from pdflow_runtime.http.openai.fields import rewritten
    from pdflow_runtime.http.relay import relay
    from pdflow_runtime.http.responder import Responder
    from pdflow_runtime.http.server import serve_http
    from pdflow_runtime.http.sockets import listen

    client = HttpClient(idle_per_host=1024)
    kv = msgspec.json.Decoder(dict[str, msgspec.Raw])
    path = "/v1/completions"
    internal = ("kv_transfer_params",)
    prefill = {"max_tokens": 1, "stream": False, "kv_transfer_params": {"do_remote_decode": True}}

    async def handle(request: HttpRequest, responder: Responder) -> None:
        if request.path == "/cpu":
            await responder.reply(200, (JSON,), b"%d" % time.process_time_ns())
            return
        asked = read_completion(request.body)
        name: Header = (b"x-request-id", request.header(b"x-request-id") or b"r")
        body = rewritten(asked.fields, drop=internal)
        if pd:
            first = rewritten(asked.fields, drop=internal, put=prefill)
            async with client.request("POST", "127.0.0.1", engine_port, path, (JSON, name), first) as response:
                params = kv.decode(await response.read())["kv_transfer_params"]
            body = rewritten(asked.fields, put={"kv_transfer_params": params})
        async with client.request("POST", "127.0.0.1", engine_port, path, (JSON, name), body) as response:
            await relay(response, responder, (name,))

    async with trio.open_nursery() as nursery:
        server = await nursery.start(serve_http, listen("127.0.0.1", 0), handle)
        print(server.port, flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "engine":
        asyncio.run(engine())
    else:
        import trio

        trio.run(router, int(sys.argv[2]), "--pd" in sys.argv)
