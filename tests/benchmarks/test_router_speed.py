"""The router's benchmark runs, and every chunk arrives; what its figures must be is for its reader."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from benchmarks import link_security
from benchmarks.router_processes import BOTH_LEGS, INSTALL, ONE_LEG, PDFLOW, PEERS, cpu_ns, engines, tree
from benchmarks.router_speed import Load, measured, measured_together

SMALL = Load(streams=(2,), chunks=5, times=2, seconds=0.3)
PEER_FOLDER = "PDFLOW_ROUTER_PEERS"
"""The environment variable that names a virtual environment with the peers."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [PDFLOW, *PEERS])
def test_a_router_is_measured(name: str) -> None:
    folder = None if name == PDFLOW else Path(os.environ.get(PEER_FOLDER, sys.prefix))
    if folder is not None and not (folder / "bin" / name).is_file():
        pytest.skip(f"{name} is not in the environment that {PEER_FOLDER} names: {INSTALL}")
    with engines() as ports:
        figures = asyncio.run(measured(name, ports, SMALL, folder))
    for legs in ("one leg", "P and D"):
        assert figures[f"CPU us/chunk, 2 streams, {legs}"] > 0
        assert figures[f"CPU us/request, {legs}"] > 0
        assert figures[f"chunk transit p50 ms, 2 streams, {legs}"] > 0


@pytest.mark.slow
def test_two_routers_share_the_engines() -> None:
    with engines() as ports:
        figures = asyncio.run(measured_together(2, ports, SMALL))
    assert all(figures[f"requests/s, {legs}"] > 0 for legs in ("one leg", "P and D"))


@pytest.mark.nightly
def test_every_protection_of_requests_is_measured() -> None:
    with link_security.variants() as made:
        for variant in made.values():
            figures = asyncio.run(link_security.measured(variant, SMALL))
            assert len(figures) == 4
            assert all(value > 0 for value in figures.values())


def test_the_cpu_of_a_process_includes_its_ended_threads() -> None:
    def work() -> None:
        sum(range(3_000_000))

    before = cpu_ns(os.getpid())
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert cpu_ns(os.getpid()) - before > 1_000_000


def test_the_tree_of_a_process_has_its_children() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            assert {os.getpid(), child.pid} <= set(tree(os.getpid()))
        finally:
            child.kill()


def test_legs_are_those_of_the_stub_engines() -> None:
    with engines() as ports:
        assert sorted({name.rpartition("-")[0] for name in ports}) == sorted((*ONE_LEG, *BOTH_LEGS))
