"""What is NIXL's own: it is optional, quiet, and burns nothing while nothing is in flight."""

from __future__ import annotations

import logging
import sys

import msgspec
import pytest
import trio.testing

from pdflow_runtime.transports.base import MissingBackend, TransportError, WordArrived
from pdflow_runtime.transports.nixl import INSTALL, NixlTransport
from pdflow_runtime.transports.streams.messages import Description
from tests.runtime.transports.agents import NIXL, REGION_BYTES, TENSOR, agents, pair


def test_a_missing_library_is_one_sentence_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    with pytest.raises(MissingBackend) as caught:
        NixlTransport("p.r0", lambda event: None)
    assert str(caught.value).endswith(INSTALL)
    assert "\n" not in str(caught.value)


@pytest.mark.trio
@pytest.mark.parametrize("kind", [NIXL])
async def test_nobody_polls_while_nothing_is_in_flight(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    async with pair(kind) as (p, d):
        assert await p.ended(p.write("d.r0", [(0, 0, 64)]))
        assert await d.ended(d.read("p.r0", [(0, 0, 64)]))
        p.transport.flush("d.r0")
        await trio.testing.wait_all_tasks_blocked()
        for agent in (p, d):
            assert isinstance(agent.transport, NixlTransport)
            assert not agent.transport._is_fetched_from()
    assert logging.getLogger("nixl").handlers == []
    assert capfd.readouterr().out == ""


@pytest.mark.trio
@pytest.mark.parametrize("kind", [TENSOR])
async def test_a_region_may_be_somebody_else_s(kind: str) -> None:
    pytest.importorskip("torch")
    async with pair(kind) as (p, d):
        p.memory[:] = bytes(range(256)) * (REGION_BYTES >> 8)
        assert await p.ended(p.write("d.r0", [(0, 4096, 1000), (5, 0, 3)], notification=b"n"))
        assert d.memory[4096:5096] == p.memory[:1000]
        assert d.memory[:4] == bytes([5, 6, 7, 0])
        assert await d.ended(d.read("p.r0", [(0, 0, REGION_BYTES)]))
        assert d.memory == bytes(p.memory)
        d.transport.read_word(9, "p.r0", 8)
        await d.wait_for(WordArrived(9, int.from_bytes(bytes(range(8, 16)), "little")))


@pytest.mark.trio
@pytest.mark.parametrize("kind", [NIXL])
async def test_a_memory_that_begins_nowhere_is_not_reached(kind: str) -> None:
    async with agents(kind, "p.r0", "d.r0") as (p, d):
        description = msgspec.msgpack.decode(p.transport.describe(), type=Description)
        wrong = msgspec.structs.replace(
            description, segments=(msgspec.structs.replace(description.segments[0], address=-8),)
        )
        with pytest.raises(TransportError, match="segment 0 of a memory cannot begin at -8"):
            await d.transport.connect("p.r0", msgspec.msgpack.encode(wrong))


@pytest.mark.trio
@pytest.mark.parametrize("kind", [NIXL])
async def test_no_lease_word_is_kept_that_nobody_waits_for(kind: str) -> None:
    async with pair(kind) as (_, d):
        assert isinstance(d.transport, NixlTransport)
        for op in range(8):
            d.transport.read_word(op, "p.r0", 8 * op)
        d.transport.fence("p.r0", 1)
        assert WordArrived(7, None) in d.events
        assert d.transport._slots == {}
