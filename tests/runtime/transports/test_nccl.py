"""What is NCCL's own: groups, the stand-in for it, and the real library, without a GPU as far as its refusal."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import trio
import trio.testing

from pdflow_runtime.gpu.driver import gpus
from pdflow_runtime.transports.base import Fenced, NotificationArrived, PeerGone, TransportError
from pdflow_runtime.transports.copying import Mapped
from pdflow_runtime.transports.named import caution_of, transport_named
from pdflow_runtime.transports.nccl.groups import CHUNK_BYTES, CudaStaging, HostStaging, NcclGroup
from pdflow_runtime.transports.nccl.library import INSTALL, library_path, real_library
from pdflow_runtime.transports.nccl.standin import StandIn, StandInId
from pdflow_runtime.transports.nccl.transport import Bodies, NcclTransport, split
from pdflow_runtime.transports.region import FOLDER
from tests.runtime.transports.agents import REGION_BYTES, agents, child, pair, untouched

LIBRARY = library_path()
NO_GPU = "no GPU found"


def group_files() -> set[Path]:
    return set(FOLDER.glob("pdflow-*.kv"))


def both(ident: bytes) -> tuple[NcclGroup, NcclGroup]:
    """Two ranks of a group, in threads of one process."""
    library = StandIn()
    first, second = NcclGroup(library, ident, 0), NcclGroup(library, ident, 1)
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
    first.staging.host.view[:] = b"\x07" * CHUNK_BYTES
    sent = threading.Event()

    def send() -> None:
        first.send(CHUNK_BYTES)
        sent.set()

    sending = threading.Thread(target=send)
    sending.start()
    assert not sent.wait(0.01)
    second.receive(CHUNK_BYTES)
    sending.join()
    assert bytes(second.staging.host.view) == b"\x07" * CHUNK_BYTES
    threading.Timer(0.01, second.abort).start()
    with pytest.raises(RuntimeError, match="stand-in error: aborted"):
        second.receive(1)


def test_one_rank_sends_to_itself_within_a_group() -> None:
    library = StandIn()
    alone = NcclGroup(library, library.ncclGetUniqueId().internal, 0, ranks=1)
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
    chunks = list(split(np.array(offsets, np.uint64), np.array(lengths, np.uint64)))
    assert all(chunk.nbytes == sum(chunk.lists()[2]) == CHUNK_BYTES for chunk in chunks[:-1])
    assert sum(chunk.nbytes for chunk in chunks) == sum(lengths)
    at = 10_000
    for chunk in chunks:
        for source, there, size in zip(*chunk.lists(), strict=True):
            assert (source, there) == (at, (at - 10_000) % CHUNK_BYTES)
            at += size


def test_the_name_shows_which_library_is_used() -> None:
    transport = NcclTransport("p.r0", lambda event: None, library=StandIn())
    assert transport.label == "p.r0 (nccl stand-in)"
    assert transport.name == "nccl stand-in"
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
        assert link.remote._staged is None
        assert untouched(d)
        assert await p.ended(p.write("d.r0", [(0, 0, 64)], generation=6, notification=b"new"))
        assert link.remote._staged is not None


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
    library = real_library()
    assert library.ncclGetVersion().startswith("2.")
    ident = bytes(library.ncclGetUniqueId().internal)
    assert len(ident) == 128
    with pytest.raises(RuntimeError, match="NCCL error: unhandled cuda error"):
        NcclGroup(library, ident, 0, ranks).open(HostStaging())


@pytest.mark.gpu
@pytest.mark.skipif(gpus() == 0, reason=NO_GPU)
def test_one_rank_moves_vram_to_itself() -> None:
    torch = pytest.importorskip("torch")
    library = real_library()
    alone = NcclGroup(library, bytes(library.ncclGetUniqueId().internal), 0, ranks=1)
    alone.open(CudaStaging())
    source = torch.arange(64 << 20, dtype=torch.int32, device="cuda").view(torch.uint8)
    target = torch.zeros_like(source)
    torch.cuda.synchronize()
    alone.pass_on(source.data_ptr(), target.data_ptr(), source.numel())
    assert torch.equal(source, target)


@pytest.mark.gpu2
@pytest.mark.skipif(gpus() < 2, reason="no two GPUs are here: NCCL refuses two ranks on one")
@pytest.mark.trio
async def test_two_ranks_on_two_gpus_write_and_read() -> None:
    async with agents("nccl on GPUs", "d.r0") as (d,):
        with child("nccl on GPUs", "p.r0", d.transport.describe().hex(), env={"CUDA_VISIBLE_DEVICES": "1"}) as p:
            await d.wait_for(NotificationArrived("p.r0", b"whole"))
            assert bytes(d.memory) == b"\x01" * REGION_BYTES
            await d.transport.connect("p.r0", p.description)
            d.memory[:] = bytes(REGION_BYTES)
            d.transport.fence("p.r0", 1)
            await d.wait_for(Fenced("p.r0"))
            assert await d.ended(d.read("p.r0", [(0, 0, REGION_BYTES)]))
            assert bytes(d.memory) == b"\x01" * REGION_BYTES
