"""The benchmark runs; what it must show is judged by eye, since it measures the machine as well."""

from __future__ import annotations

import pytest

from benchmarks.transport_speed import measured


@pytest.mark.slow
@pytest.mark.trio
@pytest.mark.parametrize("kind", ["shm", "tcp", "tcp by TLS", "nccl stand-in"])
async def test_every_transport_against_the_bare_machine(kind: str) -> None:
    lines = await measured(kind, rounds=1, count=32)
    assert len(lines) == 7
    assert all(line.startswith(kind) for line in lines)
