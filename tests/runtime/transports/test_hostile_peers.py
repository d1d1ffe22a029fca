"""Peers that are broken or hostile: their own streams close, with a reason in the log, and nothing else notices."""

from __future__ import annotations

import os
import random
import re
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager

import msgspec
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from pdflow.layout.descriptors import Descriptor
from pdflow.protocol.wire.malformed import Malformed
from pdflow_runtime.transports import host
from pdflow_runtime.transports.base import PeerGone, TransportError
from pdflow_runtime.transports.nccl import bodies
from pdflow_runtime.transports.nccl.staging import CHUNK_BYTES
from pdflow_runtime.transports.nccl.standin import StandIn
from pdflow_runtime.transports.nccl.transport import SIZE_BYTES
from pdflow_runtime.transports.region import OwnedRegion
from pdflow_runtime.transports.streams.messages import (
    FEW_PIECES,
    MAX_HELLO_BYTES,
    MAX_NOTIFICATION_BYTES,
    VERSION,
    AgentHello,
    ConnectionRefused,
    Data,
    Description,
    Message,
    OperationEnded,
    PackedPieces,
    ReadRequest,
    ReadWordRequest,
    Welcome,
    WordValue,
    Write,
    frame,
    pack,
    parse,
    parse_description,
    unpack_pieces,
)
from tests.runtime.transports.agents import EMBEDDED, FAKE_CUDA_IPC, REGION_BYTES, TCP_ADOPTED, Agent, agents, untouched

ONE = pack([Descriptor(0, 0, 8)])
BEYOND = pack([Descriptor(0, REGION_BYTES, 1)])
NCCL = "nccl stand-in"


def a_group() -> bytes:
    return StandIn().ncclGetUniqueId().internal + CHUNK_BYTES.to_bytes(SIZE_BYTES, "little")


@pytest.fixture(params=[*EMBEDDED, *TCP_ADOPTED, *FAKE_CUDA_IPC])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@contextmanager
def unauthenticated_stream(description: bytes) -> Iterator[tuple[Description, trio.SocketStream, AgentHello]]:
    """A stream to an agent on which nothing has been said, and what a peer would say first."""
    described = msgspec.msgpack.decode(description, type=Description)
    unix = described.transport in ("shm", "cuda-ipc")
    sock = socket.socket(socket.AF_UNIX if unix else socket.AF_INET)
    sock.connect(described.host if unix else (described.host, described.port))
    region = OwnedRegion(REGION_BYTES) if unix else None
    path, group = str(region.path) if region else "", b"" if described.transport != NCCL else a_group()
    hello = AgentHello(VERSION, "x.r0", 1, described.incarnation, described.token, path, REGION_BYTES, group)
    if described.transport == "cuda-ipc":  # Whoever has this description can name the memory that it is of.
        same = {name: getattr(described, name) for name in ("memory", "nbytes", "agent", "segments")}
        hello = msgspec.structs.replace(hello, **same)
    with sock:
        yield described, trio.SocketStream(trio.socket.from_stdlib_socket(sock)), hello
    if region is not None:
        region.close()


async def closed(stream: trio.SocketStream) -> bytes:
    """All that the agent says until it closes the stream."""
    received = b""
    with trio.fail_after(20):
        try:
            while chunk := await stream.receive_some():
                received += chunk
        except trio.BrokenResourceError:
            pass
    return received


@pytest.mark.trio
async def test_silent_pending_connections_do_not_keep_peers_out(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever held all places was waited for, and every peer hung up on."""
    monkeypatch.setattr(host, "GREETING_S", 3600)
    monkeypatch.setattr(host, "MAX_PENDING", 4)
    async with agents(kind, "p.r0", "d.r0") as (p, d):
        description = d.transport.describe()
        with ExitStack() as held:
            silent = [held.enter_context(unauthenticated_stream(description))[1] for _ in range(4)]
            await p.transport.connect("d.r0", description)
            assert await p.ended(p.write("d.r0", [(0, 0, 8)]))
            assert await closed(silent[0]) == b""
            silent += [held.enter_context(unauthenticated_stream(description))[1] for _ in range(5)]
            for stream in silent[1:5]:
                assert await closed(stream) == b""
            assert await p.ended(p.write("d.r0", [(0, 0, 8)])), "who has said who it is gives way to nobody"


@pytest.mark.trio
@pytest.mark.parametrize(
    ("garbled", "reason"),
    [
        (lambda hello: b"\xff\xff\xff\xff", f"exceeds the limit of {MAX_HELLO_BYTES}"),
        (lambda hello: b"\0\0\0\0", "a message of 0 bytes"),
        (lambda hello: b"\0\0\0\x04\xc1\xc1\xc1\xc1", "closing the connection"),
        (lambda hello: b"GET / HTTP/1.1\r\n\r\n", "exceeds the limit"),
        (lambda hello: frame(Write(1, 1, ONE, None)), "its first message is not a greeting"),
        (
            lambda hello: frame(msgspec.structs.replace(hello, token=bytes(16))),
            "does not know the token of this memory",
        ),
        (lambda hello: frame(msgspec.structs.replace(hello, token=b"")), "does not know the token of this memory"),
        (
            lambda hello: frame(msgspec.structs.replace(hello, version=VERSION + 1)),
            "its first message is not a greeting",
        ),
        (lambda hello: frame(msgspec.structs.replace(hello, name="")), "its first message is not a greeting"),
        (lambda hello: frame(msgspec.structs.replace(hello, name="a\nb")), "its first message is not a greeting"),
        (lambda hello: frame(msgspec.structs.replace(hello, name="n" * 300)), "its first message is not a greeting"),
    ],
)
async def test_an_unauthenticated_stream_is_closed(
    kind: str, garbled: Callable[[AgentHello], bytes], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with agents(kind, "d.r0") as (d,):
        with unauthenticated_stream(d.transport.describe()) as (_, stream, hello):
            await stream.send_all(garbled(hello))
            assert await closed(stream) == b""
        assert "closing the connection of an unknown peer" in caplog.text
        assert reason in caplog.text
        assert d.events == []


@pytest.mark.trio
async def test_a_peer_of_a_former_agent_is_notified(kind: str) -> None:
    async with agents(kind, "d.r0") as (d,):
        with unauthenticated_stream(d.transport.describe()) as (described, stream, hello):
            await stream.send_all(frame(msgspec.structs.replace(hello, target_incarnation=described.incarnation + 1)))
            assert await closed(stream) == frame(ConnectionRefused(described.incarnation))


@pytest.mark.trio
@pytest.mark.parametrize(
    "message",
    [
        Write(1, 1, BEYOND, None),
        Write(1, 1, ONE[:-1], None),
        Write(1, 1, ONE[:-8], None),
        Write(1, 1, ONE, bytes(MAX_NOTIFICATION_BYTES + 1)),
        ReadRequest(1, pack([Descriptor(REGION_BYTES, 0, 1)])),
        ReadRequest(1, b"odd"),
        Welcome(),
        OperationEnded(1, True),
        Data(1, 8),
        WordValue(1, 8),
    ],
)
async def test_a_guest_that_misbehaves_is_shown_out(
    kind: str, message: Message, caplog: pytest.LogCaptureFixture
) -> None:
    async with agents(kind, "p.r0", "d.r0") as (p, d):
        await p.transport.connect("d.r0", d.transport.describe())
        with unauthenticated_stream(d.transport.describe()) as (_, stream, hello):
            await stream.send_all(frame(hello) + frame(message))
            assert await closed(stream) == frame(Welcome())
        assert "closing the connection of x.r0" in caplog.text
        await d.wait_for(PeerGone("x.r0"))
        assert untouched(d)
        assert await p.ended(p.write("d.r0", [(0, 0, 8)], notification=b"unharmed"))


@pytest.mark.trio
async def test_random_messages_close_their_own_stream_at_worst(kind: str) -> None:
    source = random.Random(7)
    messages: list[Message] = [
        Write(1, 1, ONE, b"n"),
        ReadRequest(2, ONE),
        ReadWordRequest(3, 0),
        OperationEnded(4, True),
        Welcome(),
    ]
    async with agents(kind, "p.r0", "d.r0") as (p, d):
        await p.transport.connect("d.r0", d.transport.describe())
        for _ in range(60):
            bent = bytearray(b"".join(frame(source.choice(messages)) for _ in range(3)))
            for _ in range(source.randrange(4)):
                bent[source.randrange(len(bent))] = source.randrange(256)
            with unauthenticated_stream(d.transport.describe()) as (_, stream, hello):
                await stream.send_all(frame(hello) + bent)
                await stream.send_eof()
                await closed(stream)
        assert await p.ended(p.write("d.r0", [(0, 0, 8)], notification=b"unharmed"))
        assert all(len(notification) <= MAX_NOTIFICATION_BYTES for notification in d.notifications())


@pytest.mark.trio
async def test_a_stream_that_ends_within_a_message_leaves_no_notification(kind: str) -> None:
    async with agents(kind, "d.r0") as (d,):
        whole = frame(Write(1, 1, ONE, b"n"))
        for length in range(len(whole)):
            with unauthenticated_stream(d.transport.describe()) as (_, stream, hello):
                await stream.send_all(frame(hello) + whole[:length])
                await stream.send_eof()
                await closed(stream)
        assert d.notifications() == []


@asynccontextmanager
async def nonsense(x: Agent, reply: bytes) -> AsyncIterator[bytes]:
    """A description that leads, instead of to this agent, to a host that welcomes everybody and then says this."""

    async def host(stream: trio.SocketStream) -> None:
        async with stream:
            await stream.receive_some()
            await stream.send_all(frame(Welcome()) + reply)
            while await stream.receive_some():
                pass

    described = msgspec.msgpack.decode(x.transport.describe(), type=Description)
    unix = described.transport in ("shm", "cuda-ipc")
    sock = trio.socket.socket(socket.AF_UNIX if unix else socket.AF_INET)
    # Another name with the same pid: agents of other processes remove the files of processes that are gone.
    path = re.sub(r"[0-9a-f]{16}(?=\.sock$)", lambda name: name[0][::-1], described.host)
    await sock.bind(path if unix else ("127.0.0.1", 0))
    sock.listen()
    where = {"host": path} if unix else {"port": sock.getsockname()[1]}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, host, [trio.SocketListener(sock)])
        yield msgspec.msgpack.encode(msgspec.structs.replace(described, **where))
        nursery.cancel_scope.cancel()
    if unix:
        os.unlink(path)


@pytest.mark.trio
@pytest.mark.parametrize(
    "reply", [b"\xff\xff\xff\xff", frame(Write(1, 1, ONE, b"n")), frame(Welcome()), b"\0\0\0\1\x90"]
)
async def test_a_host_that_answers_nonsense_is_left(kind: str, reply: bytes) -> None:
    async with agents(kind, "d.r0", "x.r0") as (d, x), nonsense(x, reply) as description:
        await d.transport.connect("x.r0", description)
        assert not await d.ended(d.write("x.r0", [(0, 0, 8)]))
        await d.wait_for(PeerGone("x.r0"))
        assert untouched(d)


@pytest.mark.trio
@pytest.mark.parametrize(
    "description",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode(Description("nixl", 1, bytes(16), "h", 1, "", 1)),
        msgspec.msgpack.encode(Description("tcp", 1, bytes(16), "no address", 1, "", 1)),
        msgspec.msgpack.encode(Description("tcp", 1, bytes(16), "127.0.0.1", 1, "", 1)),
        msgspec.msgpack.encode(Description("tcp", 1, bytes(16), "\0", 1, "", 1)),
        msgspec.msgpack.encode(Description("tcp", 1, b"short", "127.0.0.1", 1, "", 1)),
        msgspec.msgpack.encode(Description("tcp", 1, bytes(16), "127.0.0.1", 1 << 16, "", 1)),
        msgspec.msgpack.encode(Description("shm", 1, bytes(16), "/etc/passwd", 0, "/etc/passwd", 1)),
        msgspec.msgpack.encode(Description("shm", 1, bytes(16), "\0abstract", 0, "", 1)),
        msgspec.msgpack.encode(Description("shm", 1, bytes(16), "/dev/shm/pdflow-1-0123456789abcdef.sock", 0, "", 1)),
    ],
)
async def test_a_description_of_nobody_is_one_sentence(kind: str, description: bytes) -> None:
    async with agents(kind, "d.r0") as (d,):
        with pytest.raises(TransportError) as caught:
            await d.transport.connect("x.r0", description)
        assert "x.r0" in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.trio
async def test_bodies_that_the_peer_does_not_read_are_not_kept_without_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(bodies, "MAX_BODIES", 4)
    async with agents("nccl", "d.r0", "x.r0") as (d, x):
        with unauthenticated_stream(d.transport.describe()) as (_, stream, hello):
            await stream.send_all(frame(hello) + b"".join(frame(ReadRequest(op, ONE)) for op in range(5)))
            await closed(stream)
        assert "closing the connection of x.r0: 4 announced transfers wait" in caplog.text
        async with nonsense(x, b"".join(frame(Data(op, 8)) for op in range(5))) as description:
            await d.transport.connect("x.r0", description)
            await d.wait_for(PeerGone("x.r0"))
        assert "closing the connection to x.r0: 4 announced transfers wait" in caplog.text


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_none(body: bytes) -> None:
    parse(body)
    parse_description(body)


piece = st.builds(Descriptor, st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
near = st.builds(Descriptor, st.integers(0, 110), st.integers(0, 220), st.integers(0, 220))


@given(st.lists(piece | near, max_size=5), st.sampled_from([1, FEW_PIECES]))
def test_pieces_are_accepted_if_each_lies_within_both_regions(pieces: list[Descriptor], times: int) -> None:
    pieces = times * pieces
    found = unpack_pieces(pack(pieces), 100, 200)
    within = all(p.source_address + p.length <= 100 and p.target_address + p.length <= 200 for p in pieces)
    assert isinstance(found, PackedPieces if within else Malformed)
    if isinstance(found, PackedPieces):
        assert list(map(Descriptor, *found.lists())) == pieces == list(map(Descriptor, *found.columns().tolist()))
        assert found.nbytes == sum(p.length for p in pieces)
