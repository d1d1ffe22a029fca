"""The attacks, in a process of their own: python -m benchmarks.hostile.attacks HOST:PORT NAME...

They run until stdin ends; then what they got is written to stdout, a line each.
"""

from __future__ import annotations

import socket
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import msgspec
import trio

from pdflow_runtime.http.client import HttpClient
from pdflow_runtime.http.errors import UpstreamError
from pdflow_runtime.http.messages import JSON

COUNTED = 16_500
"""Words of a prompt that is refused, but not for its bytes alone: of two bytes each, twice as many as the quickstart's
context has tokens."""
HEAD = b"POST /v1/completions HTTP/1.1\r\n"
POST = HEAD + b"Host: x\r\nContent-Length: %d\r\n\r\n%b"
CHUNKED = HEAD + b"Host: x\r\nTransfer-Encoding: chunked\r\n\r\n"
PROMPT = msgspec.json.encode({"prompt": "A prefill engine computes", "max_tokens": 1})
LONG_ANSWER = b"GET /" + b"a" * 60_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n"
"""Its path is in the answer, a 404 that costs the router little."""
MALFORMED = {
    "chunk of 16 F's": CHUNKED + b"F" * 16 + b"\r\n",
    "chunk of 15 F's": CHUNKED + b"F" * 15 + b"\r\n",
    "size line without end": CHUNKED + b"1;" + b"e" * 8192,
    "no Host": HEAD + b"Content-Length: 0\r\n\r\n",
    "two Hosts": HEAD + b"Host: x\r\nHost: y\r\nContent-Length: 0\r\n\r\n",
    "HTTP/1.0 with chunks": CHUNKED.replace(b"HTTP/1.1", b"HTTP/1.0") + b"0\r\n\r\n",
    "Upgrade: h2c": HEAD
    + b"Host: localhost\r\nConnection: Upgrade, HTTP2-Settings, close\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMA\r\n"
    + b"Content-Length: %d\r\n\r\n" % len(PROMPT)
    + PROMPT,
}
BODY_BYTES = (4 << 20) - 100
"""Within the quickstart's limit."""
UNREAD = 256
"""Connections that read nothing. On each, so many requests for a long answer are sent, more than the system's buffers
hold:"""
UNREAD_REQUESTS = 100
PIPELINES = 64
"""Such connections with bodies of a megabyte behind these requests:"""
PIPELINED = 8
HELD_S = 10.0
REST_S = 1.0


class Tally:
    """What an attack got: how often, and within which time at most."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.slowest_s: dict[str, float] = {}

    def add(self, name: str, status: object, begun: float | None = None) -> None:
        self.counts[f"{name}: {status}"] += 1
        if begun is not None:
            self.slowest_s[name] = max(self.slowest_s.get(name, 0.0), time.perf_counter() - begun)

    def lines(self) -> list[str]:
        counts = [f"{name}, {count:,} times" for name, count in sorted(self.counts.items())]
        times = [f"{name}: answered within {1e3 * seconds:.0f} ms" for name, seconds in self.slowest_s.items()]
        return counts + times


Address = tuple[str, int]
Attack = Callable[[Address, Tally], Awaitable[None]]


async def ask(address: Address, tally: Tally, name: str, body: bytes) -> None:
    begun, client = time.perf_counter(), HttpClient()
    try:
        async with client.request("POST", *address, "/v1/completions", (JSON,), body) as response:
            await response.read()
    except UpstreamError as error:
        tally.add(name, error.kind)
        await trio.sleep(0.1)
    else:
        tally.add(name, response.status, begun)
    finally:
        client.close()


async def repeat(address: Address, tally: Tally, name: str, body: bytes) -> None:
    while True:
        await ask(address, tally, name, body)


async def long_prompts(address: Address, tally: Tally) -> None:
    bodies = {
        "4 MB": msgspec.json.encode({"prompt": "a " * 1_999_000, "max_tokens": 1}),
        "15 MB": msgspec.json.encode({"prompt": "a " * 7_500_000, "max_tokens": 1}),
        "33 kB": msgspec.json.encode({"prompt": "a " * COUNTED, "max_tokens": 1}),
    }
    async with trio.open_nursery() as nursery:
        for name in ("4 MB", *bodies, "4 MB"):
            nursery.start_soon(repeat, address, tally, name, bodies[name])


def repeated(start: bytes, value: bytes, end: bytes, most: int = BODY_BYTES) -> bytes:
    count = (min(most, BODY_BYTES) - len(start) - len(end)) // (len(value) + 1)
    return start + b",".join([value] * count) + end


async def small_values(address: Address, tally: Tally) -> None:
    """4 MiB each, and what is just allowed."""
    bodies = {
        "lists": repeated(b'{"prompt":[', b"[]", b"]}"),
        "objects": repeated(b'{"messages":[', b'{"a":{}}', b"]}"),
        "floats": repeated(b'{"prompt":"a","user":[', b"1.5e300", b"]}"),
        "floats, few": repeated(b'{"prompt":"a","user":[', b"1.5e300", b"]}", 30_000),
        "fields": repeated(b'{"prompt":"a",', b'"a":1', b"}"),
        "ids": repeated(b'{"prompt":[', b"1", b"]}"),
        "ids, allowed": repeated(b'{"prompt":[', b"1", b"]}", 1_000_000),
        "long numbers": repeated(b'{"prompt_token_ids":[', b"9" * 4_000, b"]}"),
        "deep": b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    }

    async def in_turn() -> None:
        while True:
            for name, body in bodies.items():
                await ask(address, tally, name, body)

    async with trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(in_turn)


async def malformed(address: Address, tally: Tally) -> None:
    while True:
        for name, data in MALFORMED.items():
            begun = time.perf_counter()
            answer = b""
            with suppress(OSError, trio.BrokenResourceError):
                async with await trio.open_tcp_stream(*address) as stream:
                    await stream.send_all(data)
                    answer = await stream.receive_some()
            tally.add(name, answer[9:12].decode() or "closed", begun)
            await trio.sleep(0.02)


async def unread(address: Address, tally: Tally) -> None:
    """Clients that read nothing of their answers."""
    await unread_with(address, tally, "unread answers", UNREAD, b"")


async def pipelined(address: Address, tally: Tally) -> None:
    """The same with whole requests of a megabyte behind those whose answers are not read."""
    body = b'{"prompt":"' + b"a" * ((1 << 20) - 13) + b'"}'
    await unread_with(address, tally, "bodies behind", PIPELINES, (POST % (len(body), body)) * PIPELINED)


async def unread_with(address: Address, tally: Tally, name: str, connections: int, behind: bytes) -> None:
    requests = LONG_ANSWER * UNREAD_REQUESTS + behind

    async def one() -> None:
        while True:
            status = "held"
            try:
                with trio.socket.socket() as sock, trio.move_on_after(HELD_S):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                    await sock.connect(address)
                    await trio.SocketStream(sock).send_all(requests)
                    status = "all requests taken"
                    await trio.sleep_forever()
            except (OSError, trio.BrokenResourceError):
                status = "closed"
            tally.add(name, status)
            await trio.sleep(REST_S)

    async with trio.open_nursery() as nursery:
        for _ in range(connections):
            nursery.start_soon(one)


ATTACKS: dict[str, Attack] = {
    "long prompts": long_prompts,
    "small values": small_values,
    "malformed requests": malformed,
    "pipelined bodies": pipelined,
    "unread answers": unread,
}


async def run(address: Address, names: Sequence[str]) -> None:
    tallies = {name: Tally() for name in names}
    async with trio.open_nursery() as nursery:
        for name in names:
            nursery.start_soon(ATTACKS[name], address, tallies[name])
        sys.stdout.write(f"attacking with: {', '.join(names)}\n")
        sys.stdout.flush()
        await trio.to_thread.run_sync(sys.stdin.read)
        nursery.cancel_scope.cancel()
    for name, tally in tallies.items():
        sys.stdout.writelines(f"{name}: {line}\n" for line in tally.lines())


def main() -> None:
    host, _, port = sys.argv[1].rpartition(":")
    trio.run(run, (host, int(port)), sys.argv[2:])


if __name__ == "__main__":
    main()
