"""The peer of router_speed.py: the same router on uvicorn (uvloop, httptools), starlette and aiohttp.

    pip install uvicorn uvloop httptools starlette aiohttp
    python benchmarks/router_peer.py ENGINE_PORT [--pd]

It imports nothing of pdflow, so that it can run in an environment of its own.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import AsyncIterator

import aiohttp
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

ENGINE = f"http://127.0.0.1:{sys.argv[1]}/v1/completions"
PD = "--pd" in sys.argv
session: aiohttp.ClientSession | None = None


async def cpu(_: Request) -> Response:
    return JSONResponse(time.process_time_ns())


async def completions(request: Request) -> Response:
    global session
    if session is None:
        session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(None))
    asked = json.loads(await request.body())
    headers = {"x-request-id": request.headers.get("x-request-id", "r")}
    asked.pop("kv_transfer_params", None)
    if PD:
        first = asked | {"max_tokens": 1, "stream": False, "kv_transfer_params": {"do_remote_decode": True}}
        async with session.post(ENGINE, json=first, headers=headers) as response:
            asked["kv_transfer_params"] = (await response.json())["kv_transfer_params"]
    upstream = await session.post(ENGINE, json=asked, headers=headers)

    async def pieces() -> AsyncIterator[bytes]:
        async with upstream:
            async for piece in upstream.content.iter_any():
                yield piece

    return StreamingResponse(pieces(), upstream.status, headers, upstream.headers["content-type"])


if __name__ == "__main__":
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    print(listener.getsockname()[1], flush=True)
    app = Starlette(routes=[Route("/cpu", cpu), Route("/v1/completions", completions, methods=["POST"])])
    config = uvicorn.Config(app, loop="uvloop", http="httptools", log_level="error", access_log=False)
    uvicorn.Server(config).run(sockets=[listener])
