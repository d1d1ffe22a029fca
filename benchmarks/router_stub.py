"""The stub engines of router_speed.py, all in one process, which prints the port of each:

    python benchmarks/router_stub.py [--tls FOLDER | --unix FOLDER] NAME...

An engine streams `max_tokens` events of about 220 bytes, one write each, `pace_ms` apart. What is not streamed is
answered at once with kv_transfer_params: NIXL's, and for pdflow's router those under "pdflow" as well. Every GET is
answered with a list of one model.

--tls: clients must use TLS 1.3 and present a certificate; FOLDER has tls_cert, tls_key and tls_ca. --unix: the engine
of port N, which is its number then, listens at the Unix socket FOLDER/N.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import ssl
import time
from functools import partial
from pathlib import Path
from typing import Any

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = (
    '{"id":"cmpl-9f1c2d3e4b5a69788796a5b4c3d2e1f0","object":"text_completion","created":1700000000,"model":"stub",'
    '"choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":null,"token_ids":[12345]}],"at":%d}'
)
LAST = b"data: [DONE]\n\n"
KV_PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_request_id": "cmpl-9f1c2d3e4b5a69788796a5b4c3d2e1f0",
    "remote_block_ids": list(range(64)),
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
}
BLOCK_SIZE = 16
MODELS = {"object": "list", "data": [{"id": "stub", "object": "model", "owned_by": "stub", "max_model_len": 32768}]}
MODEL_INFO = {"model_path": "stub", "served_model_name": "stub", "is_generation": True}


class Engine(asyncio.Protocol):
    """One connection to a stub: one request at a time."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.got = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.got += data
        head, found, body = self.got.partition(b"\r\n\r\n")
        if not found:
            return
        if head.startswith((b"GET", b"HEAD")):
            self.got = b""
            self.answer(MODELS if b"/v1/models" in head else MODEL_INFO)
            return
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        if len(body) < length:
            return
        self.got = b""
        asked = json.loads(body)
        if not asked.get("stream"):
            self.answer(self.prefilled(asked.get("kv_transfer_params") or {}))
            return
        self.transport.write(HEAD)
        self.stream(asked["max_tokens"], asked.get("pace_ms", 0) / 1e3, asyncio.get_running_loop().time())

    def prefilled(self, asked: dict[str, Any]) -> dict[str, Any]:
        params: dict[str, Any] = {**KV_PARAMS, "remote_engine_id": self.name}
        if "pdflow" in asked:
            params["pdflow"] = {"xid": asked["pdflow"]["xid"], "block_size": BLOCK_SIZE}
        choice = {"index": 0, "text": " word", "logprobs": None, "finish_reason": "length"}
        usage = {"prompt_tokens": 900, "completion_tokens": 1, "total_tokens": 901}
        named = {"id": "cmpl-1", "object": "text_completion", "created": 1700000000, "model": "stub"}
        return {**named, "choices": [choice], "usage": usage, "kv_transfer_params": params}

    def answer(self, fields: dict[str, Any]) -> None:
        body = json.dumps(fields).encode()
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.transport.write(head + body)

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
        self.transport.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(LAST), LAST))


def context_of(folder: Path) -> ssl.SSLContext:
    """Return the context of a server that accepts clients of its own authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(folder / "tls_cert", folder / "tls_key")
    context.load_verify_locations(folder / "tls_ca")
    return context


async def main(names: list[str], tls: Path | None, unix: Path | None) -> None:
    loop = asyncio.get_running_loop()
    factories = [partial(Engine, name) for name in names]
    if unix is not None:
        servers = [
            await loop.create_unix_server(factory, unix / str(number), backlog=1024)
            for number, factory in enumerate(factories, 1)
        ]
        print(*range(1, len(names) + 1), flush=True)
    else:
        context = None if tls is None else context_of(tls)
        servers = [
            await loop.create_server(factory, "127.0.0.1", 0, backlog=1024, ssl=context) for factory in factories
        ]
        print(*(server.sockets[0].getsockname()[1] for server in servers), flush=True)
    await asyncio.gather(*(server.serve_forever() for server in servers))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", metavar="NAME")
    parser.add_argument("--tls", type=Path, metavar="FOLDER")
    parser.add_argument("--unix", type=Path, metavar="FOLDER")
    asked = parser.parse_args()
    asyncio.run(main(asked.names, asked.tls, asked.unix))
