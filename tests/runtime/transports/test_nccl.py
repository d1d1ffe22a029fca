"""What is NCCL's own: groups, the stand-in for it, and the real library, without a GPU as far as its refusal."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import trio
import trio.testing

from pdflow.layout.descriptors import Descriptor
from pdflow_runtime.gpu.driver import gpus
from pdflow_runtime.transports.adopting import Segment, address_of, adopt, own_start
from pdflow_runtime.transports.asking import anonymous
from pdflow_runtime.transports.base import (
    Ended,
    Fenced,
    MissingBackend,
    NotificationArrived,
    PeerGone,
    TransportError,
    WordArrived,
)
from pdflow_runtime.transports.copying import Mapped, Motion
from pdflow_runtime.transports.named import caution_of, transport_named
from pdflow_runtime.transports.nccl import library, transport
from pdflow_runtime.transports.nccl.bodies import Bodies, split
from pdflow_runtime.transports.nccl.groups import OPEN_TIMEOUT_S, NcclGroup
from pdflow_runtime.transports.nccl.interfaces import VARIABLE, follow_host, interface_of
from pdflow_runtime.transports.nccl.library import ID_BYTES, INSTALL, Nccl, library_path, real_library
from pdflow_runtime.transports.nccl.staging import (
    CHUNK_BYTES,
    CudaDevice,
    CudaStaging,
    HostStaging,
    TensorRegion,
    gpu_errors,
)
from pdflow_runtime.transports.nccl.standin import StandIn, StandInId
from pdflow_runtime.transports.nccl.transport import NcclTransport
from pdflow_runtime.transports.region import FOLDER
from pdflow_runtime.transports.streams.messages import AgentHello, Description, PackedPieces, pack
from tests.runtime.transports.agents import (
    KINDS,
    OWN_BYTES,
    REGION_BYTES,
    TIMEOUT_S,
    agents,
    child,
    pair,
    untouched,
)
from tests.runtime.transports.kernels import CpuDevice, CpuStaging

LIBRARY = library_path()
NEEDS_TORCH = pytest.mark.skipif(find_spec("torch") is None, reason="no torch")
NO_GPU = "no GPU found"


def group_files() -> set[Path]:
    return set(FOLDER.glob(f"pdflow-{os.getpid()}-*.kv"))


def both(ident: bytes) -> tuple[NcclGroup, NcclGroup]:
    """Two ranks of a group, in threads of one process."""
    stand_in = StandIn()
    first, second = NcclGroup(stand_in, ident, 0), NcclGroup(stand_in, ident, 1)
    opening = threading.Thread(target=first.open, args=(HostStaging(),))
    opening.start()
    second.open(HostStaging())
    opening.join()
    return first, second


def test_ranks_connect_and_leave_no_file_behind() -> None:
    before = group_files()
    both(StandIn().ncclGetUniqueId().internal)
    assert group_files() <= before


def test_a_send_waits_for_its_receive_and_an_abort_ends_what_waits() -> None:
    first, second = both(StandIn().ncclGetUniqueId().internal)
    source, target = first.staging, second.staging
    assert isinstance(source, HostStaging)
    assert isinstance(target, HostStaging)
    source.host.view[:] = b"\x07" * CHUNK_BYTES
    sent = threading.Event()

    def send() -> None:
        first.send(CHUNK_BYTES)
        sent.set()

    sending = threading.Thread(target=send)
    sending.start()
    assert not sent.wait(0.01)
    second.receive(CHUNK_BYTES)
    sending.join()
    assert bytes(target.host.view) == b"\x07" * CHUNK_BYTES
    threading.Timer(0.01, second.abort).start()
    with pytest.raises(RuntimeError, match="the group was aborted"):
        second.receive(1)


def test_one_rank_sends_to_itself_within_a_group() -> None:
    stand_in = StandIn()
    alone = NcclGroup(stand_in, stand_in.ncclGetUniqueId().internal, 0, ranks=1)
    alone.open(HostStaging())
    source, target = (Mapped(memoryview(bytearray(3 << 20))) for _ in range(2))
    source.view[:] = b"\x05" * len(source.view)
    alone.pass_on(source.address, target.address, source.nbytes)
    assert target.view == source.view


@pytest.mark.parametrize("path", ["/etc/passwd", "../../etc/passwd", "pdflow-1.kv", "\xff", ""])
def test_a_group_has_no_other_file_than_agents_make(path: str) -> None:
    with pytest.raises(RuntimeError, match="stand-in error"):
        NcclGroup(StandIn(), path.encode().ljust(128, b"\0"), 1).open(HostStaging())


@pytest.mark.parametrize("lengths", [[], [0], [1, 0, 2], [CHUNK_BYTES], [CHUNK_BYTES - 1, 2], [3 * CHUNK_BYTES + 5]])
def test_bodies_are_split_into_full_buffers(lengths: list[int]) -> None:
    offsets = [10_000 + sum(lengths[:at]) for at in range(len(lengths))]
    chunks = list(split(np.array(offsets, np.uint64), np.array(lengths, np.uint64), CHUNK_BYTES))
    assert all(chunk.nbytes == sum(chunk.lists()[2]) == CHUNK_BYTES for chunk in chunks[:-1])
    assert sum(chunk.nbytes for chunk in chunks) == sum(lengths)
    at = 10_000
    for chunk in chunks:
        for source, there, size in zip(*chunk.lists(), strict=True):
            assert (source, there) == (at, (at - 10_000) % CHUNK_BYTES)
            at += size


def test_the_name_shows_which_library_is_used() -> None:
    made = NcclTransport("p.r0", lambda event: None, library=StandIn())
    assert made.label == "p.r0 (nccl stand-in)"
    assert made.name == "nccl stand-in"
    if not gpus():
        assert "stand-in" in str(caution_of("nccl"))
        assert transport_named("nccl") is NcclTransport


@pytest.mark.trio
async def test_a_refused_write_sends_nothing() -> None:
    async with pair("nccl") as (p, d):
        d.transport.fence("p.r0", 5)
        assert not await p.ended(p.write("d.r0", [(0, 0, 64)], generation=5, notification=b"old"))
        link = p.transport._links["d.r0"]
        assert isinstance(link.remote, Bodies)
        assert link.remote._staging is None
        assert untouched(d)
        assert await p.ended(p.write("d.r0", [(0, 0, 64)], generation=6, notification=b"new"))
        assert link.remote._staging is not None


@pytest.mark.trio
async def test_what_comes_after_a_fence_stays_in_the_buffer_and_the_group_goes_on() -> None:
    async with agents("nccl", "d.r0") as (d,):
        with child("nccl", "p.r0", d.transport.describe().hex()) as p:
            await d.wait_for(NotificationArrived("p.r0", b"whole"))
            d.transport.fence("p.r0", 1)
            await d.wait_for(Fenced("p.r0"))
            d.memory[:] = bytes(REGION_BYTES)
            assert await trio.to_thread.run_sync(p.next_message) == "refused"
            assert untouched(d)
            assert PeerGone("p.r0") not in d.events


@pytest.mark.trio
async def test_whoever_names_no_group_is_not_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StandIn, "ncclGetUniqueId", lambda self: StandInId(b"too short"))
    async with agents("nccl", "d.r0", "p.r0") as (d, p):
        with pytest.raises(TransportError):
            await p.transport.connect("d.r0", d.transport.describe())
        assert d.events == []


@pytest.mark.skipif(LIBRARY is None, reason=f"no NCCL: {INSTALL}")
@pytest.mark.skipif(gpus() > 0, reason="there is a GPU: it would not refuse")
@pytest.mark.parametrize("ranks", [1, 2])
def test_without_a_gpu_the_real_library_goes_as_far_as_its_refusal(ranks: int) -> None:
    real = real_library()
    assert real.ncclGetVersion().startswith("2.")
    ident = bytes(real.ncclGetUniqueId().internal)
    assert len(ident) == 128
    with pytest.raises(RuntimeError, match="NCCL error: unhandled cuda error"):
        NcclGroup(real, ident, 0, ranks).open(HostStaging())


# Which library, and what it needs.


@pytest.mark.parametrize("path", ["/nowhere/libnccl.so.2", "libc.so.6"])
def test_what_is_no_nccl_of_today_is_one_sentence(path: str) -> None:
    with pytest.raises(MissingBackend, match=r"nccl' (cannot load NCCL|needs NCCL 2.14 or later)") as caught:
        Nccl(path)
    assert path in str(caught.value)
    assert str(caught.value).endswith(INSTALL)


def test_the_nccl_that_vllm_has_loaded_is_used_where_vllm_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = SimpleNamespace(lib=SimpleNamespace(_name="/opt/libnccl.so.2"))
    monkeypatch.setattr(library, "find_spec", lambda name: name == "vllm")
    monkeypatch.setattr(library, "import_module", lambda name: SimpleNamespace(NCCLLibrary=lambda: loaded))
    monkeypatch.setattr(library, "Nccl", lambda path: path)
    assert library.real_library() == "/opt/libnccl.so.2"  # type: ignore[comparison-overlap]


@pytest.mark.parametrize("problem", ["torch 2.11.0+cpu is built without CUDA: pip install torch", None])
def test_a_torch_without_cuda_is_refused_at_start(problem: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "gpus", lambda: 1)
    monkeypatch.setattr(transport, "library_here", StandIn)
    monkeypatch.setattr(transport, "torch_problem", lambda: problem)
    if problem is None:
        assert transport_named("nccl") is NcclTransport
        return
    with pytest.raises(MissingBackend) as caught:
        transport_named("nccl")
    assert str(caught.value) == f"the transport 'nccl' copies by torch where there are GPUs, but {problem}"


@NEEDS_TORCH
@pytest.mark.skipif(gpus() > 0, reason="there is a GPU: it would be used")
def test_a_gpu_that_cannot_be_used_is_one_sentence() -> None:
    for use in (CudaStaging, lambda gpu: CudaDevice(gpu).over_vram(4096, 8)):
        with pytest.raises(TransportError, match="GPU 0: ") as caught:
            use(0)
        assert "\n" not in str(caught.value)
    with pytest.raises(TransportError, match="cannot pin 8 MiB of memory for GPU 0: cu"):
        NcclTransport("p.r0", lambda event: None, library=StandIn(), device=CudaDevice).allocate(REGION_BYTES)


def test_an_error_of_several_lines_becomes_one() -> None:
    with pytest.raises(TransportError, match=r"^no buffer: CUDA out of memory\.$"), gpu_errors("no buffer"):
        raise RuntimeError("CUDA out of memory.\nSee the manual.")


def test_nccl_is_kept_to_the_interface_of_this_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert {interface_of(host) for host in ("127.0.0.1", "127.0.0.2", "localhost")} == {"lo"}
    assert interface_of("203.0.113.7") is None
    if Path("/proc/net/if_inet6").exists() and " lo" in Path("/proc/net/if_inet6").read_text():
        assert interface_of("::1") == "lo"
    follow_host("203.0.113.7")
    assert VARIABLE not in os.environ
    follow_host("127.0.0.1")
    assert os.environ[VARIABLE] == "=lo"
    monkeypatch.setenv(VARIABLE, "eth7")
    follow_host("127.0.0.1")
    assert os.environ[VARIABLE] == "eth7"


# Regions that are tensors.


def test_the_stand_in_adopts_nothing_unless_kernels_move_its_bytes() -> None:
    with pytest.raises(TransportError, match="transport nccl stand-in cannot adopt memory"):
        adopt(KINDS["nccl"]("p.r0", lambda event: None), [Segment(4096, 8, 0)], 64)


@NEEDS_TORCH
@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([Segment(4096, 8, 0), Segment(8192, 8, 1)], r"memory of one GPU for each rank, .* lie on GPUs \[0, 1\]"),
        ([Segment(4096, 8, 0), Segment(8196, 8, 0)], r"cannot adopt segment 1, which begins at 0x2004: .* multiple"),
    ],
)
def test_what_kernels_cannot_reach_is_not_adopted(segments: list[Segment], message: str) -> None:
    with pytest.raises(TransportError, match=message):
        adopt(KINDS["nccl by kernels"]("p.r0", lambda event: None), segments, 64)


@NEEDS_TORCH
@pytest.mark.trio
async def test_bytes_move_between_vram_and_words_are_asked_for() -> None:
    """With a GPU's memory, as the CPU's kernels take this to be, no byte of a segment is read by the CPU."""
    memories = [bytearray(3 << 20) for _ in range(4)]
    events: list[Any] = []
    p, d = (KINDS["nccl by kernels"](name, events.append) for name in ("p.r0", "d.r0"))
    segments = [Segment(address_of(memoryview(memory)), len(memory), 0) for memory in memories]
    owns = [adopt(p, segments[:2], OWN_BYTES), adopt(d, segments[2:], OWN_BYTES)]
    memories[1][:] = os.urandom(3 << 20)
    start = own_start(segments[:2])
    owns[0][8:16] = (77).to_bytes(8, "little")

    async def until(event: object) -> None:
        with trio.fail_after(TIMEOUT_S):
            while event not in events:
                await trio.sleep(0.001)

    async with trio.open_nursery() as nursery:
        for agent in (p, d):
            await nursery.start(agent.run)
        await p.connect("d.r0", d.describe())
        await d.connect("p.r0", p.describe())
        p.write(1, "d.r0", [Descriptor(3 << 20, 64, (3 << 20) - 64), Descriptor(start + 8, 0, 8)], 1, b"n")
        await until(NotificationArrived("p.r0", b"n"))
        assert memories[2][64:] == memories[1][:-64]
        assert memories[2][:8] == (77).to_bytes(8, "little")
        for op, address, value in ((2, start + 8, 77), (3, 3 << 20, None), (4, start + OWN_BYTES, None)):
            d.read_word(op, "p.r0", address)
            await until(WordArrived(op, value))
        assert PeerGone("p.r0") not in events
        await p.aclose()
        await d.aclose()


@NEEDS_TORCH
@pytest.mark.parametrize("own_bytes", [0, 4096])
@pytest.mark.parametrize("seed", range(8))
def test_kernels_gather_and_scatter_any_pieces(seed: int, own_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(seed)
    sizes = random.integers(1, 50_000, 1 + seed // 2 % 3).tolist()
    if seed % 2:
        monkeypatch.setattr("pdflow_runtime.gpu.pieces.STEP_BYTES", 1 << 12)  # So that they take several kernels.
    memories = [bytearray(random.bytes(size)) for size in sizes]
    own = memoryview(bytearray(own_bytes))
    region = TensorRegion([Segment(address_of(memoryview(m)), len(m)) for m in memories], own, CpuDevice(0))
    unit = int(random.choice([1, 2, 8, 512]))
    pieces, to = [], 0
    for _ in range(random.integers(1, 60)):
        number = int(random.integers(len(sizes)))
        first, last = sorted(random.integers(0, sizes[number] // unit + 1, 2).tolist())
        pieces.append((number, first * unit, to, (last - first) * unit))
        to += (last - first) * unit
    starts = region.map.starts
    expected = b"".join(bytes(memories[number][at : at + length]) for number, at, _, length in pieces)
    buffer = CpuStaging()
    gathered = pack([Descriptor(starts[number] + at, to, length) for number, at, to, length in pieces])
    trio.run(buffer.gather(region, PackedPieces(gathered, to)).run)
    assert bytes(buffer.buffer[:to].numpy()) == expected
    for memory in memories:
        memory[:] = bytes(len(memory))
    scattered = pack([Descriptor(to, starts[number] + at, length) for number, at, to, length in pieces])
    trio.run(buffer.scatter(region, PackedPieces(scattered, to)).run)
    # Pieces of one memory may overlap: they hold the same bytes.
    assert b"".join(bytes(memories[n][at : at + length]) for n, at, _, length in pieces) == expected


@pytest.mark.trio
async def test_ranks_that_cut_bodies_differently_refuse_each_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with agents("nccl", "d.r0", "p.r0") as (d, p):
        monkeypatch.setattr(p.transport, "_hello", partial(_cutting, p.transport._hello, 1 << 20))
        with pytest.raises(TransportError):
            await p.transport.connect("d.r0", d.transport.describe())
        assert "chunks of 1048576 bytes, this rank of 4194304" in caplog.text


def _cutting(hello: Callable[[Description], AgentHello], nbytes: int, described: Description) -> AgentHello:
    honest = hello(described)
    return msgspec.structs.replace(honest, agent=honest.agent[:ID_BYTES] + nbytes.to_bytes(8, "little"))


@pytest.mark.trio
@pytest.mark.parametrize("side", ["gather", "scatter"])
async def test_a_device_that_fails_ends_the_connection_on_both_sides(
    side: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(Motion):
        async def run(self) -> None:
            raise TransportError("kernels could not copy KV: out of memory")

    async with agents("nccl", "d.r0", "p.r0") as (d, p):
        await p.transport.connect("d.r0", d.transport.describe())
        monkeypatch.setattr(HostStaging, side, lambda *args: Failing(None, "", 0))
        assert not await p.ended(p.write("d.r0", [(0, 0, 64)], notification=b"n"))
        await d.wait_for(PeerGone("p.r0"))
        await p.wait_for(PeerGone("d.r0"))
        assert "a transfer was lost: kernels could not copy KV: out of memory" in caplog.text
        assert d.notifications() == []


@pytest.mark.trio
async def test_a_write_that_comes_while_a_group_is_being_freed_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Freeing takes NCCL a while. A WRITE that is announced then would wait for a group that is over."""
    freed = threading.Event()

    class Failing(Motion):
        async def run(self) -> None:
            raise TransportError("kernels could not copy KV: out of memory")

    async with agents("nccl", "d.r0", "p.r0") as (d, p):
        await p.transport.connect("d.r0", d.transport.describe())
        assert await p.ended(p.write("d.r0", [(0, 0, 64)]))
        (guest,) = d.transport._guests
        assert isinstance(guest.remote, Bodies)
        monkeypatch.setattr(guest.remote._staging, "gather", lambda *args: Failing(None, "", 0))
        monkeypatch.setattr(guest.remote._group, "close", lambda: freed.wait(TIMEOUT_S))
        read = p.read("d.r0", [(0, 0, 64)])
        with trio.fail_after(TIMEOUT_S):
            while not guest.remote._over:
                await trio.sleep(0.001)
        late = p.write("d.r0", [(0, 64, 64)])
        await trio.sleep(0.05)
        freed.set()
        assert not await p.ended(read)
        assert not await p.ended(late)
        await d.wait_for(PeerGone("p.r0"))


# On GPUs.


@pytest.mark.gpu
@pytest.mark.skipif(gpus() == 0, reason=NO_GPU)
@pytest.mark.trio
@pytest.mark.parametrize("in_vram", [True, False])
async def test_one_rank_moves_a_region_to_itself(in_vram: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that two ranks do, but for the other rank: gather, send, receive and scatter, by the buffers of two."""
    torch = pytest.importorskip("torch")
    monkeypatch.setenv(VARIABLE, "=lo")
    real, device = real_library(), CudaDevice(0)
    nbytes, row = 64 << 20, 4096
    held, regions = [], []
    for _ in range(2):
        if in_vram:
            memory: Any = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
            segment = Segment(memory.data_ptr(), nbytes, 0)
        else:
            memory = np.frombuffer(anonymous(nbytes), np.uint8)
            segment = Segment(memory.ctypes.data, nbytes)
        held.append(torch.as_tensor(memory))
        regions.append(TensorRegion([segment], memoryview(bytearray()), device))
    source, target = held
    source.copy_(torch.randint(0, 256, (nbytes,), dtype=torch.uint8))
    torch.cuda.synchronize()
    first, second = device.staging(), device.staging()
    count = first.nbytes // row
    order = np.random.default_rng(1).permutation(nbytes // row)
    alone = NcclGroup(real, bytes(real.ncclGetUniqueId().internal), 0, ranks=1)
    await trio.to_thread.run_sync(alone.open, first)
    for begin in range(0, len(order), count):
        rows = order[begin : begin + count]
        gathered = pack([Descriptor(int(at) * row, n * row, row) for n, at in enumerate(rows)])
        await first.gather(regions[0], PackedPieces(gathered, len(rows) * row)).run()
        await trio.to_thread.run_sync(alone.pass_on, first.address, second.address, len(rows) * row)
        scattered = pack([Descriptor(n * row, int(at) * row, row) for n, at in enumerate(rows)])
        await second.scatter(regions[1], PackedPieces(scattered, len(rows) * row)).run()
    assert torch.equal(source, target)
    await trio.to_thread.run_sync(alone.close)


def open_on_gpu_0(pipe: Connection, ident: bytes, rank: int) -> None:
    """In a process of its own: say how opening a group on the first GPU ended."""
    group = NcclGroup(real_library(), ident, rank)
    try:
        group.open(CudaStaging(0))
        pipe.send("it opened")
    except RuntimeError as error:
        pipe.send(str(error))
    group.close()


@pytest.fixture
def ends() -> Iterator[list[Any]]:
    """Processes that are killed in the end."""
    processes: list[Any] = []
    yield processes
    for process in processes:
        process.kill()
        process.join()


@pytest.mark.gpu
@pytest.mark.skipif(gpus() == 0, reason=NO_GPU)
def test_two_ranks_on_one_gpu_are_refused_and_neither_hangs(ends: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "=lo")
    ident = bytes(real_library().ncclGetUniqueId().internal)
    context, pipes = get_context("spawn"), []
    for rank in range(2):
        ours, theirs = context.Pipe()
        process = context.Process(target=open_on_gpu_0, args=(theirs, ident, rank))
        process.start()
        ends.append(process)
        pipes.append(ours)
    for process, pipe in zip(ends, pipes, strict=True):
        assert pipe.poll(TIMEOUT_S + OPEN_TIMEOUT_S)
        assert pipe.recv().startswith("NCCL error: invalid usage")
        process.join(TIMEOUT_S)
        assert process.exitcode == 0


NEEDS_TWO = pytest.mark.skipif(gpus() < 2, reason="no two GPUs are here: NCCL refuses two ranks on one")
SECOND = {"CUDA_VISIBLE_DEVICES": "1,0"}
"""As pdflow starts the process of an engine on the second GPU."""
ON_GPUS = pytest.mark.parametrize("kind", ["nccl on GPUs", "nccl on GPUs, VRAM"])


@pytest.mark.gpu2
@NEEDS_TWO
@ON_GPUS
@pytest.mark.trio
async def test_two_ranks_on_two_gpus_write_and_read(kind: str) -> None:
    async with agents(kind, "d.r0") as (d,):
        with child(kind, "p.r0", d.transport.describe().hex(), env=SECOND) as p:
            await d.wait_for(NotificationArrived("p.r0", b"whole"))
            assert bytes(d.memory) == b"\x01" * REGION_BYTES
            await d.transport.connect("p.r0", p.description)
            d.transport.fence("p.r0", 1)
            await d.wait_for(Fenced("p.r0"))
            d.memory[:] = bytes(REGION_BYTES)
            pieces = [(at * 8192, REGION_BYTES - (at + 1) * 8192, 8192) for at in range(REGION_BYTES // 8192)]
            assert await d.ended(d.read("p.r0", pieces))
            assert bytes(d.memory) == b"\x01" * REGION_BYTES


@pytest.mark.gpu2
@NEEDS_TWO
@ON_GPUS
@pytest.mark.trio
async def test_a_writer_on_another_gpu_is_killed(kind: str) -> None:
    """NCCL's kernel waits for it here, and is aborted."""
    async with agents(kind, "d.r0") as (d,):
        with child(kind, "p.r0", d.transport.describe().hex(), env=SECOND) as p:
            await d.wait_for(NotificationArrived("p.r0", b"whole"))
            p.send_signal(signal.SIGKILL)
            await d.wait_for(PeerGone("p.r0"))
            d.memory[:] = bytes(REGION_BYTES)
            await trio.sleep(0.1)
            assert untouched(d)


@pytest.mark.gpu2
@NEEDS_TWO
@ON_GPUS
@pytest.mark.trio
async def test_a_target_on_another_gpu_is_killed(kind: str) -> None:
    async with agents(kind, "p.r0") as (p,):
        with child(kind, "d.r0", env=SECOND) as d:
            await p.transport.connect("d.r0", d.description)
            ops = [p.write("d.r0", [(0, 0, REGION_BYTES)]) for _ in range(20)]
            await p.ended(ops[0])
            d.send_signal(signal.SIGKILL)
            p.transport.fence("d.r0", 1)
            await p.wait_for(Fenced("d.r0"))
            assert sorted(event.op for event in p.events if isinstance(event, Ended)) == ops
