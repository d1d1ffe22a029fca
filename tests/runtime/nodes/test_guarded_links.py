"""Streams between ranks that prove themselves: who does not know the secret, or has no certificate, is nobody, hears
nothing of memories, and harms nobody."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import trio
import trio.testing
import trustme
from hypothesis import given, settings
from hypothesis import strategies as st

from pdflow.errors import ScenarioError
from pdflow.protocol.effects import Handshake, Send
from pdflow.protocol.events import HandshakeEnded, PeerLost, Received
from pdflow.protocol.wire.strict import Hello, encode_frame
from pdflow_runtime.nodes.links import RankLink
from pdflow_runtime.security.proving import MAGIC, Proof
from pdflow_runtime.security.secret import Secret
from pdflow_runtime.security.tls import Tls, tls_of
from tests.runtime.nodes.test_links import CANCEL, connected, sides
from tests.runtime.support.certificates import certify, tls_in
from tests.runtime.support.live_pair import cluster

SECRET = Secret(b"what all parts of this cluster know")
OTHER = Secret(b"what parts of another cluster know")
HELLO = encode_frame(Hello("d.r0", 100, 1, 0, "p.r0", b"a token"))


@pytest.mark.trio
async def test_who_knows_the_secret_is_a_peer() -> None:
    async with sides("d", "p", secret=SECRET) as (d, p):
        await connected(d, p)
        assert d.memory.connected == [("p.r0", b"about p.r0")]
        d.links.send(d.port, Send("p.r0", CANCEL))
        assert await p.endpoint.get(Received) == [Received("d.r0", 100, CANCEL)]


@pytest.mark.parametrize("theirs", [None, OTHER])
@pytest.mark.trio
async def test_who_does_not_know_it_is_no_peer_on_either_side(
    theirs: Secret | None, caplog: pytest.LogCaptureFixture
) -> None:
    async with sides("d", "p", "friend", secret=SECRET) as (d, p, friend):
        await connected(friend, p)
        d.links.secret = theirs
        d.links.handshake(d.port, Handshake("p.r0"))
        assert await d.endpoint.get(HandshakeEnded) == [HandshakeEnded("p.r0", False, 0)]
        p.links.book["d"] = ("127.0.0.1", d.tcp)
        p.links.handshake(p.port, Handshake("d.r0"))
        assert await p.endpoint.get(HandshakeEnded) == [HandshakeEnded("d.r0", False, 0)]
        friend.links.send(friend.port, Send("p.r0", CANCEL))
        assert await p.endpoint.get(Received) == [Received("friend.r0", 102, CANCEL)]
        assert not [event for event in p.endpoint.events if type(event) is PeerLost]
        assert d.memory.connected == []
    logged = " ".join(record.getMessage() for record in caplog.records)
    assert ("this side has none" if theirs is None else "the peer has another cluster secret") in logged


@pytest.mark.trio
async def test_memories_are_not_described_to_an_unauthenticated_peer() -> None:
    """An impostor where a peer was said to hear: all that he is told is a nonce."""
    received = bytearray()

    async def impostor(stream: trio.SocketStream) -> None:
        received.extend(await stream.receive_some())
        await stream.send_all(bytes(64))
        async for data in stream:
            received.extend(data)

    async with sides("d", secret=SECRET) as (d,), trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, impostor, [listener])
        d.links.book["p"] = listener.socket.getsockname()[:2]
        d.links.handshake(d.port, Handshake("p.r0"))
        assert await d.endpoint.get(HandshakeEnded) == [HandshakeEnded("p.r0", False, 0)]
        nursery.cancel_scope.cancel()
    assert received.startswith(MAGIC)
    assert len(received) == len(MAGIC) + 32


async def greeted() -> tuple[bytes, bytes]:
    """What the opener and the acceptor of one stream say, up to their HELLOs."""
    sent: tuple[bytearray, bytearray] = (bytearray(), bytearray())
    one, other = trio.testing.memory_stream_pair()
    links = RankLink(one, SECRET), RankLink(other, SECRET)
    for link, record in zip(links, sent, strict=True):
        link.stream.send_all = recorded(link.stream, record)  # type: ignore[method-assign]

    async def accept() -> None:
        await links[1].prove(False)
        hello = await links[1].receive_hello()
        await links[1].send_hello(encode_frame(Hello("p.r0", 101, 2, hello.nonce, "d.r0")))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(accept)
        await links[0].prove(True)
        await links[0].send_hello(HELLO)
        assert (await links[0].receive_hello()).address == "p.r0"
    return bytes(sent[0]), bytes(sent[1])


def recorded(stream: trio.abc.Stream, into: bytearray) -> Callable[[bytes], object]:
    send_all = stream.send_all

    async def send(data: bytes) -> None:
        into.extend(data)
        await send_all(data)

    return send


async def accepts(data: bytes) -> bool:
    """Whether an acceptor believes an opener that says just this, whatever it hears."""
    one, other = trio.testing.memory_stream_pair()
    link = RankLink(other, SECRET)
    await one.send_all(data)
    await one.send_eof()
    try:
        await link.prove(False)
        await link.receive_hello()
    except ValueError:
        return False
    return True


@pytest.mark.trio
async def test_a_recorded_handshake_cannot_be_replayed() -> None:
    opener, acceptor = await greeted()
    assert HELLO in opener
    assert not await accepts(opener)
    assert not await accepts(acceptor)


@pytest.mark.trio
async def test_a_proof_is_of_one_side_of_one_stream_and_one_hello() -> None:
    nonces = (b"1" * 32, b"2" * 32)
    opener, acceptor = Proof(SECRET, True, nonces), Proof(SECRET, False, nonces)
    proved = opener.ours(b"hello")
    acceptor.check(proved, b"hello")
    answered = acceptor.ours(b"and you")
    opener.check(answered, b"and you")
    fresh = Proof(SECRET, True, nonces)
    fresh.ours(b"another hello")
    wrong = (
        (Proof(SECRET, False, nonces), proved, b"hullo"),
        (Proof(SECRET, False, (nonces[1], nonces[0])), proved, b"hello"),
        (Proof(OTHER, False, nonces), proved, b"hello"),
        (Proof(SECRET, True, nonces), proved, b"hello"),
        (fresh, answered, b"and you"),
    )
    for proof, claimed, hello in wrong:
        with pytest.raises(ValueError, match="has another cluster secret"):
            proof.check(claimed, hello)


@given(st.one_of(st.binary(max_size=300), st.binary(max_size=200).map(lambda rest: MAGIC + bytes(32) + rest)))
@settings(max_examples=200, deadline=None)
def test_no_bytes_of_an_unauthenticated_peer_are_accepted_or_raise_anything_else(data: bytes) -> None:
    assert not trio.run(accepts, data)


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_an_acceptor_that_answers_anything_else_is_refused(data: st.DataObject) -> None:
    reply = data.draw(st.binary(max_size=200))

    async def opened() -> bool:
        one, other = trio.testing.memory_stream_pair()
        await other.send_all(reply)
        await other.send_eof()
        link = RankLink(one, SECRET)
        try:
            await link.prove(True)
        except ValueError:
            return False
        return True

    assert not trio.run(opened)


# TLS.


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tls]:
    """Makes what a part of the cluster of that name has."""
    made: dict[str, Tls] = {}

    def of(name: str) -> Tls:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            certify(folder, trustme.CA())
            made[name] = tls_in(folder)
        return made[name]

    return of


@pytest.mark.trio
async def test_streams_may_go_by_tls(tls: Callable[[str], Tls]) -> None:
    async with sides("d", "p", secret=SECRET, tls=tls("ours")) as (d, p):
        await connected(d, p)
        for _ in range(100):
            d.links.send(d.port, Send("p.r0", CANCEL))
            p.links.send(p.port, Send("d.r0", CANCEL))
        assert len(await p.endpoint.get(Received, 100)) == len(await d.endpoint.get(Received, 100)) == 100


@pytest.mark.parametrize("theirs", ["another", None])
@pytest.mark.trio
async def test_who_has_no_certificate_of_our_authority_is_no_peer(
    theirs: str | None, tls: Callable[[str], Tls], caplog: pytest.LogCaptureFixture
) -> None:
    async with sides("d", "p", "friend", secret=SECRET, tls=tls("ours")) as (d, p, friend):
        await connected(friend, p)
        d.links.tls = None if theirs is None else tls(theirs)
        d.links.handshake(d.port, Handshake("p.r0"))
        assert await d.endpoint.get(HandshakeEnded) == [HandshakeEnded("p.r0", False, 0)]
        friend.links.send(friend.port, Send("p.r0", CANCEL))
        assert await p.endpoint.get(Received) == [Received("friend.r0", 102, CANCEL)]
        assert not [event for event in p.endpoint.events if type(event) is PeerLost]
    assert [record for record in caplog.records if "rejected an incoming connection" in record.getMessage()]


def test_certificates_come_with_a_key_and_an_authority(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"serve\.tls_key: is missing"):
        tls_of(cluster("serve.tls_cert=cert.pem", "serve.tls_ca=ca.pem"))
    with pytest.raises(ScenarioError, match="No such file"):
        tls_of(cluster(*(f"serve.{key}={tmp_path}/{key}.pem" for key in ("tls_cert", "tls_key", "tls_ca"))))
    assert tls_of(cluster()) is None
