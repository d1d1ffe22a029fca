"""The router's benchmark runs, and every chunk arrives; what its figures must be is for its reader."""

from __future__ import annotations

import asyncio
import sys

import pytest

from benchmarks.router_speed import HERE, Load, available, measured, process

SCRIPT = (sys.executable, str(HERE / "router_processes.py"))
OURS = (*SCRIPT, "router")
PEER = (sys.executable, str(HERE / "router_peer.py"))


@pytest.mark.slow
@pytest.mark.parametrize("command", [OURS, PEER], ids=["pdflow", "peer"])
def test_a_router_is_measured(command: tuple[str, ...]) -> None:
    if command is PEER and not available(sys.executable):
        pytest.skip("the peer is not here: pip install uvicorn uvloop httptools starlette aiohttp")
    with process(*SCRIPT, "engine") as engine:
        figures = asyncio.run(measured(command, engine, Load(streams=(2,), chunks=5, times=2, seconds=0.3)))
    assert all(figures[f"CPU us/{what}"] > 0 for what in ("chunk, 2 streams", "request, one leg", "request, P and D"))
    assert figures["chunk transit p50 ms, 2 streams"] > 0
