"""What is cuda-ipc's own: what it adopts, what it opens and gives up of peers, and how its copies end."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import trio

from pdflow.layout.descriptors import Descriptor
from pdflow_runtime.gpu import pieces
from pdflow_runtime.gpu.driver import HANDLE_BYTES, GpuError
from pdflow_runtime.gpu.ipc import Allocations
from pdflow_runtime.gpu.memory import tensor_at
from pdflow_runtime.gpu.pieces import RowCopies
from pdflow_runtime.transports import cuda_ipc
from pdflow_runtime.transports.adopting import Segment, address_of, adopt, own_start
from pdflow_runtime.transports.base import Ended, Fenced, MissingBackend, PeerGone, TransportError, WordArrived
from pdflow_runtime.transports.cuda_ipc import CudaIpcTransport
from pdflow_runtime.transports.named import transport_named
from pdflow_runtime.transports.segments import MAX_SEGMENTS, DescribedSegment
from pdflow_runtime.transports.streams.messages import AgentHello, Description, Write, frame, pack
from pdflow_runtime.transports.streams.stream import OutgoingMessage
from tests.runtime.support.fake_gpu import FAKE_GPU, FakeGpu, FakeStream, fake_allocations
from tests.runtime.transports.agents import (
    CUDA_IPC,
    FAKE_CUDA_IPC,
    OWN_BYTES,
    REGION_BYTES,
    TIMEOUT_S,
    Agent,
    agents,
    child,
    pair,
    untouched,
)

FAKE = FAKE_CUDA_IPC[0]
MIB = 1 << 20


def made(name: str = "p.r0") -> CudaIpcTransport:
    return CudaIpcTransport(name, lambda event: None, share=fake_allocations)


def opened() -> int:
    """How many allocations of other processes are open here."""
    return len(FAKE_GPU.opened)


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(TIMEOUT_S):
        while not condition():
            await trio.sleep(0.001)


# What it adopts.


def test_without_a_gpu_it_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_ipc, "gpus", lambda: 0)
    with pytest.raises(MissingBackend, match="the transport 'cuda-ipc' needs a GPU"):
        transport_named("cuda-ipc")
    monkeypatch.setattr(cuda_ipc, "gpus", lambda: 1)
    assert transport_named("cuda-ipc") is CudaIpcTransport


def test_it_allocates_nothing() -> None:
    with pytest.raises(TransportError, match=r"moves only memory of GPUs, which an engine allocates, and p\.r0 has"):
        made().allocate(4096)


@pytest.mark.parametrize(
    ("segments", "own_bytes", "message"),
    [
        ([], 64, "no segment to adopt"),
        ([Segment(4096, 8, 0), Segment(4096, 8)], 64, "a segment lies in memory of the host"),
        ([Segment(4096, 8, 1), Segment(4096, 8, 0)], 64, "memory on one GPU, and segments lie on GPUs 0, 1"),
        ([Segment(4096, 8, 0)], -1, "cannot allocate a region of -1 bytes"),
        ([Segment(4096, 0, 0)], 64, "segment 0 of a memory has 0 bytes"),
        ([Segment(4096, 8, 0)], 64, "segment 0 cannot be shared .*: no allocation is at 4096; .* expandable_segments"),
    ],
)
def test_what_it_does_not_adopt_is_one_sentence(segments: list[Segment], own_bytes: int, message: str) -> None:
    with pytest.raises(TransportError, match=message) as caught:
        adopt(made(), segments, own_bytes)
    assert "\n" not in str(caught.value)


def test_a_segment_beyond_its_allocation_is_not_adopted() -> None:
    memory = FAKE_GPU.allocate(4096)
    with pytest.raises(
        TransportError, match="segment 0 of a memory has 4,096 bytes from byte 1 on of an allocation of"
    ):
        adopt(made(), [Segment(address_of(memory) + 1, 4096, 0)], 0)
    FAKE_GPU.free([memory])


@pytest.mark.trio
@pytest.mark.parametrize("kind", FAKE_CUDA_IPC)
async def test_words_lie_in_own_memory_and_pieces_do_not(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    async with agents(kind, "p.r0", "d.r0") as (p, d):
        await d.transport.connect("p.r0", p.transport.describe())
        assert p.words_at == own_start([Segment(4096, REGION_BYTES, 0)])
        p.words[-8:] = (77).to_bytes(8, "little")
        p.memory[0:8] = b"\xff" * 8
        for op, (address, value) in enumerate({p.words_at + OWN_BYTES - 8: 77, p.words_at: 0, 0: None}.items()):
            d.transport.read_word(op, "p.r0", address)
            assert d.events[-1] == WordArrived(op, value)
        op = d.read("p.r0", [(p.words_at, 0, 8)])
        assert not await d.ended(op)
        d.transport.forget("p.r0")
        await p.transport.connect("d.r0", d.transport.describe())
        assert not await p.ended(p.write("d.r0", [(0, d.words_at, 8)], notification=b"n"))
        write = Write(1, 1, pack([Descriptor(0, d.words_at, 8)]), b"n")
        p.transport._links["d.r0"].stream.post(OutgoingMessage(frame(write)))
        await d.wait_for(PeerGone("p.r0"))
        assert "closing the connection of p.r0: a piece outside its source" in caplog.text
        assert untouched(d)
        assert not any(d.words)


@pytest.mark.trio
async def test_as_many_segments_as_are_allowed_in_one_allocation() -> None:
    memory = FAKE_GPU.allocate(MAX_SEGMENTS * 16)
    base = address_of(memory)
    events: list[Any] = []
    many = CudaIpcTransport("p.r0", events.append, share=fake_allocations)
    adopt(many, [Segment(base + 16 * at, 8, 0) for at in range(MAX_SEGMENTS - 1)], 64)
    async with agents(FAKE, "d.r0") as (d,), trio.open_nursery() as nursery:
        await nursery.start(many.run)
        await many.connect("d.r0", d.transport.describe())
        memory[16 * 4000 : 16 * 4000 + 8] = b"12345678"
        many.write(1, "d.r0", [Descriptor(8 * 4000, 3, 8)], 1, b"n")
        await until(lambda: Ended(1, True) in events)
        assert d.memory[3:11] == b"12345678"
        await many.aclose()
    FAKE_GPU.free([memory])


# What peers say of their memory.


def changed(description: bytes, **new: Any) -> bytes:
    return msgspec.msgpack.encode(msgspec.structs.replace(msgspec.msgpack.decode(description, type=Description), **new))


def segments(start: int, offset: int, nbytes: int = REGION_BYTES) -> dict[str, Any]:
    """A description of one segment and its words."""
    after = own_start([Segment(0, nbytes)])
    described = (DescribedSegment(start, nbytes, offset), DescribedSegment(after, OWN_BYTES))
    return {"segments": described, "nbytes": after + OWN_BYTES}


WRONG: Sequence[tuple[dict[str, Any], str]] = [
    (segments(0, 1), "segment 0 of a memory has 8,388,608 bytes from byte 1 on of an allocation of 8,388,608"),
    (segments(0, 2**63), "segment 0 of a memory has"),
    (segments(0, 0, REGION_BYTES + 1), "segment 0 of a memory has 8,388,609 bytes from byte 0 on"),
    (segments(8, 0), "segment 0 of a memory begins at 8"),
    ({"segments": ()}, "describes 0 segments by 64 bytes of handles"),
    ({"agent": b""}, "describes 2 segments by 0 bytes of handles"),
    ({"agent": bytes(HANDLE_BYTES - 1)}, "describes 2 segments by 63 bytes of handles"),
    ({"agent": bytes(HANDLE_BYTES + 1)}, "describes 2 segments by 65 bytes of handles"),
    ({"agent": bytes(3 * HANDLE_BYTES)}, "describes 2 segments by 192 bytes of handles"),
    ({"agent": b"\xff" * HANDLE_BYTES}, "segment 0 of a memory cannot be opened: the handle opens nothing"),
    ({"agent": b"../../etc/passwd".ljust(HANDLE_BYTES, b"\0")}, "segment 0 of a memory cannot be opened"),
    ({"memory": "/etc/passwd"}, "the peer names a file that is not an agent's"),
    ({"memory": ""}, "the peer names a file that is not an agent's"),
]


@pytest.mark.trio
@pytest.mark.parametrize(("new", "message"), WRONG)
async def test_a_description_of_other_memory_is_refused(new: dict[str, Any], message: str) -> None:
    async with agents(FAKE, "d.r0") as (d,):
        with child(FAKE, "p.r0") as p:
            with pytest.raises(TransportError, match=message) as caught:
                await d.transport.connect("p.r0", changed(p.description, **new))
            assert "\n" not in str(caught.value)
            assert opened() == 0
            await d.transport.connect("p.r0", p.description)
            assert await d.ended(d.read("p.r0", [(0, 0, 8)]))
            assert opened() == 1


@pytest.mark.trio
@pytest.mark.parametrize(("new", "message"), WRONG)
async def test_a_guest_with_other_memory_is_not_let_in(
    new: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with agents(FAKE, "p.r0", "d.r0") as (p, d):
        hello: Callable[[Description], AgentHello] = p.transport._hello
        monkeypatch.setattr(p.transport, "_hello", lambda described: msgspec.structs.replace(hello(described), **new))
        with pytest.raises(TransportError):
            await p.transport.connect("d.r0", d.transport.describe())
        assert message in caplog.text
        assert d.events == []
        monkeypatch.undo()
        await p.transport.connect("d.r0", d.transport.describe())
        assert await p.ended(p.write("d.r0", [(0, 0, 8)]))


# What is open of peers.


@pytest.mark.trio
async def test_an_allocation_is_opened_once_and_closed_behind_the_last_stream() -> None:
    kind = "cuda-ipc, fake in 5"
    async with agents(kind, "d.r0") as (d,):
        with child(kind, "p.r0", d.transport.describe().hex()) as p:
            await until(lambda: bool(d.notifications()))
            assert opened() == 2
            await d.transport.connect("p.r0", p.description)
            assert opened() == 2
            link = d.transport._links["p.r0"]
            d.transport._close_link(link)
            await until(lambda: link not in d.transport._closing)
            assert opened() == 2
            seen = len(d.notifications())
            await until(lambda: len(d.notifications()) > seen)
            p.send_signal(signal.SIGKILL)
            await d.wait_for(PeerGone("p.r0"))
            await until(lambda: opened() == 0)


@pytest.mark.trio
@pytest.mark.parametrize("ends", ["aclose", "cancel"])
async def test_an_agent_that_ends_gives_up_all_memory(ends: str) -> None:
    agent = Agent(FAKE, "d.r0")
    with child(FAKE, "p.r0") as p:
        async with trio.open_nursery() as nursery:
            await nursery.start(agent.transport.run)
            await agent.transport.connect("p.r0", p.description)
            assert opened() == 1
            for _ in range(3):
                agent.read("p.r0", [(0, 0, REGION_BYTES)])
            if ends == "aclose":
                await agent.transport.aclose()
            nursery.cancel_scope.cancel()
    assert opened() == 0
    FAKE_GPU.free(agent.memory.memories)


@pytest.mark.trio
async def test_memory_that_is_closed_is_known_to_nobody() -> None:
    known = fake_allocations(0)
    async with pair(FAKE):
        assert known._known
    assert not known._known


def test_an_allocation_is_known_as_long_as_it_is_used() -> None:
    known, memory = Allocations(FAKE_GPU), FAKE_GPU.allocate(4096)
    handle, offset = known.export(address_of(memory) + 100)
    assert (offset, len(handle)) == (100, HANDLE_BYTES)
    assert known.open(handle) == (address_of(memory), 4096)
    known.close(handle)
    known.close(handle)
    with pytest.raises(GpuError, match="the handle is one of this process"):
        known.open(handle)
    FAKE_GPU.free([memory])


def test_a_failed_close_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    class Faulty(FakeGpu):
        def open(self, handle: bytes) -> tuple[int, int]:
            return 4096, 8

        def close(self, address: int) -> None:
            raise GpuError("cuIpcCloseMemHandle: an illegal memory access was encountered")

    known = Allocations(Faulty())
    known.open(b"h")
    known.close(b"h")
    assert "cannot be given up: cuIpcCloseMemHandle: an illegal" in caplog.text


# Copies.


class HeldStream(FakeStream):
    """Each wait for a step asks first whether it may end."""

    def __init__(self, gpu: FakeGpu, ask: Callable[[int], None]) -> None:
        super().__init__(gpu)
        self.ask = ask
        self.enqueued_bytes: list[int] = []

    def copy(self, source: Any, target: Any, rows: RowCopies) -> Callable[[], None]:
        step = len(self.enqueued_bytes)
        self.enqueued_bytes.append(rows.nbytes * len(rows.sources))
        wait = super().copy(source, target, rows)

        def held() -> None:
            self.ask(step)
            wait()

        return held


def held(agent: Agent, ask: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> HeldStream:
    stream = HeldStream(FAKE_GPU, ask)
    monkeypatch.setattr(agent.transport, "_stream", stream)
    monkeypatch.setattr(pieces, "STEP_BYTES", MIB)
    return stream


@pytest.mark.trio
async def test_a_fence_waits_for_the_step_that_runs_and_no_other_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair(FAKE) as (p, d):
        p.memory[:] = b"\xff" * REGION_BYTES

        def ask(step: int) -> None:
            if step == 2:
                trio.from_thread.run_sync(d.transport.fence, "p.r0", 1)
                assert Fenced("p.r0") not in d.events

        stream = held(d, ask, monkeypatch)
        assert not await p.ended(p.write("d.r0", [(0, 0, REGION_BYTES)], notification=b"n"))
        await d.wait_for(Fenced("p.r0"))
        assert stream.enqueued_bytes == [MIB] * 3
        assert d.memory == b"\xff" * (3 * MIB) + bytes(REGION_BYTES - 3 * MIB)
        assert d.notifications() == []


@pytest.mark.trio
async def test_no_notification_comes_before_the_last_step_was_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair(FAKE) as (p, d):
        asked: list[int] = []

        def ask(step: int) -> None:
            asked.append(step)
            trio.from_thread.run(trio.sleep, 0.002)
            assert d.notifications() == []

        held(d, ask, monkeypatch)
        assert await p.ended(p.write("d.r0", [(0, 0, 4 * MIB)], notification=b"n"))
        assert asked == [0, 1, 2, 3]
        assert d.notifications() == [b"n"]


@pytest.mark.trio
@pytest.mark.parametrize("kind", FAKE_CUDA_IPC)
async def test_a_copy_that_fails_ends_its_stream(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with pair(kind) as (p, d):

        def fails(step: int) -> None:
            raise RuntimeError("CUDA error: out of memory")

        held(d, fails, monkeypatch)
        assert not await d.ended(d.read("p.r0", [(0, 0, 64)]))
        assert not await p.ended(p.write("d.r0", [(0, 0, 64)], notification=b"n"))
        await d.wait_for(PeerGone("p.r0"))
        assert "a copy from p.r0 on the GPU failed: CUDA error: out of memory" in caplog.text
        assert d.notifications() == []


@pytest.mark.trio
async def test_a_thread_that_has_not_attached_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake's rule, by which the suite sees a call that forgets it."""
    async with pair(FAKE) as (p, d):
        gpu = FakeGpu()
        monkeypatch.setattr(gpu, "attach", lambda: None)
        monkeypatch.setattr(d.transport, "_stream", FakeStream(gpu))
        assert not await d.ended(d.read("p.r0", [(0, 0, 64)]))
        with pytest.raises(GpuError, match="no context is current"):
            gpu.export(0)
        assert not await p.ended(p.write("d.r0", [(0, 0, 64)]))


def test_a_tensor_over_memory_is_that_memory() -> None:
    pytest.importorskip("torch")
    memory = np.arange(256, dtype=np.uint8)
    tensor = tensor_at(memory.ctypes.data + 8, 200, "cpu")
    tensor[0] = 99
    assert (memory[8], len(tensor), int(tensor[199])) == (99, 200, 207)
    assert tensor.data_ptr() == memory.ctypes.data + 8


@pytest.mark.trio
@pytest.mark.parametrize("kind", [CUDA_IPC])
async def test_nothing_stays_open_of_a_peer_that_was_killed(kind: str) -> None:
    known = cuda_ipc.allocations(0)
    async with agents(kind, "d.r0") as (d,):
        with child(kind, "p.r0", d.transport.describe().hex()) as p:
            await until(lambda: bool(d.notifications()))
            await d.transport.connect("p.r0", p.description)
            assert await d.ended(d.read("p.r0", [(0, 0, REGION_BYTES)]))
            p.send_signal(signal.SIGKILL)
            await d.wait_for(PeerGone("p.r0"))
            await until(lambda: all(one.is_own for one in known._known.values()))
    assert not known._known
