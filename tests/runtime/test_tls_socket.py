"""Sockets with TLS as streams of KV use them: many views at once, memory that is received into, and messages that are
taken back."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from pdflow_runtime.tls_socket import SWITCH_S, TlsSocket, accepted_with, is_sending, opened_with, share_interpreter
from pdflow_runtime.transports.streams.messages import OperationEnded, ReadRequest, frame
from pdflow_runtime.transports.streams.stream import OutgoingMessage, SocketStream
from tests.runtime.support.certificates import cluster_tls

CONTENT = bytes(range(251)) * 4200
"""1 MB, in which no two records are equal."""


async def _handshakes(*ends: TlsSocket) -> None:
    async with trio.open_nursery() as nursery:
        for end in ends:
            nursery.start_soon(end.handshake)


def unsecured_pair() -> tuple[TlsSocket, TlsSocket]:
    """The client's end and the server's, before their handshake."""
    theirs, ours = socket.socketpair()
    for end in (theirs, ours):
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 32 << 10)
    return opened_with(cluster_tls().opening(), theirs, "x"), accepted_with(cluster_tls().accepting(), ours)


@contextmanager
def tls_pair() -> Iterator[tuple[TlsSocket, TlsSocket]]:
    """Both ends after it."""
    opened, accepted = unsecured_pair()
    try:
        trio.run(_handshakes, opened, accepted)
        yield opened, accepted
    finally:
        opened.close()
        accepted.close()


def views_of(content: bytes | bytearray, borders: list[int]) -> list[memoryview]:
    sorted_borders = sorted({0, *(border % len(content) for border in borders), len(content)})
    return [memoryview(content)[start:end] for start, end in pairwise(sorted_borders)]


def behind(views: list[memoryview], count: int) -> list[memoryview]:
    left = []
    for view in views:
        left += [view[count:]] if count < len(view) else []
        count = max(0, count - len(view))
    return left


BORDERS = st.lists(st.integers(0, 1 << 30), max_size=60)


@given(st.integers(1, len(CONTENT)), BORDERS, BORDERS, st.booleans())
def test_what_is_sent_from_any_views_arrives_in_any_views(
    nbytes: int, sources: list[int], targets: list[int], by_one: bool
) -> None:
    received = bytearray(nbytes)
    sending, filling = views_of(CONTENT[:nbytes], sources), views_of(received, targets)
    with tls_pair() as (opened, accepted):
        while filling:
            with suppress(BlockingIOError):
                sending = behind(sending, opened.sendmsg(sending) if sending else 0)
            with suppress(BlockingIOError):
                count = accepted.recv_into(filling[0]) if by_one else accepted.recvmsg_into(filling)[0]
                assert count
                filling = behind(filling, count)
        assert received == CONTENT[:nbytes]
        with pytest.raises(BlockingIOError):
            accepted.recv_into(bytearray(1))


def test_one_call_receives_once_though_no_record_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that sends what the caller gets nothing of, as new keys, must not keep the thread as long as it sends."""
    with tls_pair() as (opened, accepted):
        assert opened.send(CONTENT[:16_000]) == 16_000
        monkeypatch.setattr("pdflow_runtime.tls_socket.ENCRYPTED_BYTES", 1000)
        target, refused, received = bytearray(16_000), 0, 0
        while not received:
            try:
                received = accepted.recv_into(target)
            except BlockingIOError:
                refused += 1
        assert refused == 16_000 // 1000
        assert target == CONTENT[:16_000]


def test_the_interpreter_is_never_kept_longer_than_before() -> None:
    before = sys.getswitchinterval()
    try:
        for interval_s, after in ((0.005, SWITCH_S), (SWITCH_S / 2, SWITCH_S / 2)):
            sys.setswitchinterval(interval_s)
            share_interpreter()
            assert sys.getswitchinterval() == pytest.approx(after, abs=2e-6)
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize("orderly", [True, False])
def test_the_end_comes_behind_all_bytes(orderly: bool) -> None:
    with tls_pair() as (opened, accepted):
        assert opened.send(b"all") == 3
        if orderly:
            opened.close()
        else:
            socket.socket.shutdown(opened, socket.SHUT_WR)
        target = bytearray(8)
        assert accepted.recvmsg_into([memoryview(target)[:2], memoryview(target)[2:]])[0] == 3
        assert bytes(target[:3]) == b"all"
        assert [accepted.recv_into(target), accepted.recv_into(target)] == [0, 0]


def test_who_has_ended_sending_receives_what_the_peer_sends() -> None:
    """A fenced stream ends sending, and then reads until its peer has closed the connection."""
    with tls_pair() as (opened, accepted):
        assert accepted.send(CONTENT[:20_000]) == 20_000
        target = bytearray(20_000)
        assert opened.recv_into(memoryview(target)[:5]) == 5
        opened.shutdown(socket.SHUT_WR)
        assert accepted.send(b"more") == 4
        received = 5
        while received < len(target):
            count = opened.recv_into(memoryview(target)[received:])
            assert count
            received += count
        assert target == CONTENT[:20_000]
        assert opened.recv_into(target) == 4
        assert accepted.recv_into(target) == 0


def test_bytes_that_were_changed_on_their_way_reach_no_memory() -> None:
    """What TLS decrypts is put into the caller's memory only once it is known to be the peer's."""
    with tls_pair() as (opened, accepted):
        assert opened.send(b"wanted") == 6
        encrypted = bytearray(socket.socket.recv(accepted, 1 << 16))
        encrypted[-1] ^= 1
        socket.socket.send(opened, bytes(encrypted))
        target = bytearray(6)
        with pytest.raises(OSError, match=r"(?i)mac|decryption"):
            accepted.recv_into(target)
        assert target == bytes(6)


@pytest.mark.trio
async def test_a_message_that_is_encrypted_in_part_is_not_taken_back() -> None:
    """Behind what has been encrypted nothing can follow but the rest of it."""
    opened, accepted = unsecured_pair()
    await _handshakes(opened, accepted)
    writer, reader = SocketStream(opened), SocketStream(accepted)
    posted = 0
    while not is_sending(opened):
        assert writer.post(OutgoingMessage(frame(ReadRequest(posted, bytes(9000))), op=posted))
        posted += 1
    assert writer.post(OutgoingMessage(frame(ReadRequest(posted, b"")), op=posted))
    assert not writer.take_back(posted - 1), "its record may be on its way"
    assert writer.take_back(posted)
    assert writer.post(OutgoingMessage(frame(OperationEnded(7, True))))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(writer.pump)
        with trio.fail_after(5):
            got = [await reader.message() for _ in range(posted + 1)]
        nursery.cancel_scope.cancel()
    assert got == [*(ReadRequest(op, bytes(9000)) for op in range(posted)), OperationEnded(7, True)]
    writer.close()
    reader.close()
