"""Sockets with TLS that are used as plain non-blocking ones are, by the HTTP server and client and by streams of KV.

What would block raises BlockingIOError, as for a plain socket. `send` and `sendmsg` do not count bytes whose encrypted
form the system has not taken completely, and the next call must begin with the same bytes (`is_sending`), as every
caller here does that is to lose none.
"""

from __future__ import annotations

import socket
import ssl
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any, Final, Never, TypeAlias

from trio.lowlevel import wait_readable, wait_writable

TlsNow: TypeAlias = Callable[[], ssl.SSLContext]
"""Returns what the next connection is made with."""
ENCRYPTED_BYTES: Final = 64 << 10
"""The most that one system call receives or sends. It is encrypted by one call, too: each releases the interpreter,
which other threads that compute may then keep for milliseconds."""
RECORD_BYTES: Final = 16 << 10
"""The most of one TLS record (RFC 8446 5.1)."""
SWITCH_S: Final = 0.0001
"""How long a thread may keep the interpreter where another one waits for it, in processes that move KV with TLS."""
CALLS_PER_SEND: Final = 16
"""The most system calls of one `sendmsg`: a peer that reads as fast as it is sent to would keep others from running."""
ABOUT_CERTIFICATES: Final = ("certificate", "unknown ca", "access denied")
"""Alerts by which a peer refuses a certificate have one of these in their names (RFC 8446 6)."""
_WRONG_TIME: Final = (9, 10)
"""X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED (openssl/x509_vfy.h)."""

_WRONG_NAME: Final = (62, 64)
"""X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH."""


class PlainHttpError(OSError):
    """The client does not use TLS."""


def _bypass(*_: object) -> Never:
    raise NotImplementedError("it would bypass TLS: use recv and send")


_WITHOUT_TLS: Final[Any] = _bypass
"""A plain socket's method that this one does not have."""


class TlsSocket(socket.socket):
    """One end of a connection with TLS, before or after its handshake. It takes over `sock`, which is connected and
    non-blocking. Args: `host`, the name that a server's certificate must have; None at the server's end.

    All records that have come are received by one system call, and together, as bytes without TLS are: ssl.SSLSocket
    makes two calls for each record and returns each by itself, which doubles the router's CPU per request.
    """

    def __init__(self, context: ssl.SSLContext, sock: socket.socket, host: str | None) -> None:
        self._incoming: Final = ssl.MemoryBIO()
        self._outgoing: Final = ssl.MemoryBIO()
        try:
            self._tls: Final = context.wrap_bio(
                self._incoming, self._outgoing, server_side=host is None, server_hostname=host
            )
        except BaseException:
            sock.close()
            raise
        super().__init__(fileno=sock.detach())
        self.setblocking(False)
        self._received = b""
        """Decrypted bytes that the caller has not taken yet."""
        self._end: Callable[[], bytes] | None = None
        """Returns b"", or raises an error, behind those; None while more may come."""
        self._unsent = b""
        """Encrypted bytes that the system has not taken yet."""
        self._unsent_of = 0
        """How many of the caller's bytes these are."""
        self._notified = False
        self._broke: OSError | None = None
        """How sending by itself failed: the system reports an error once, so a later receive gets an end instead."""

    @property
    def needs_certificate(self) -> bool:
        """Whether the peer must present a certificate."""
        return self._tls.context.verify_mode is ssl.CERT_REQUIRED

    @property
    def session(self) -> ssl.SSLObject:
        """The state of TLS: its version, the peer's certificate."""
        return self._tls

    @property
    def is_buffered(self) -> bool:
        """Whether `recv` has something that the system does not report."""
        return bool(self._received) or self._end is not None

    @property
    def is_sending(self) -> bool:
        """Whether bytes are encrypted, and perhaps sent in part, that no call has counted yet: the next one must begin
        with them."""
        return self._unsent_of > 0

    async def handshake(self) -> None:
        """Complete the handshake. OSError if the peer does not, or if its certificate is refused."""
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                await self._flush()
                await wait_readable(self)
                with suppress(BlockingIOError):
                    self._receive()
            except ssl.SSLError as error:
                self._send_alert()
                if error.reason == "HTTP_REQUEST":
                    raise PlainHttpError("the client sent plain HTTP") from None
                raise
            else:
                await self._flush()
                if self._incoming.pending:
                    self._decrypt()
                return

    def recv(self, buflen: int = ENCRYPTED_BYTES, flags: int = 0) -> bytes:
        if not self.is_buffered:
            self._receive()
            self._decrypt()
            self._reply()
        if self._received:
            taken, self._received = self._received[:buflen], self._received[buflen:]
            return taken
        if self._end is None:
            raise BlockingIOError
        return self._end()

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        return self.recvmsg_into([memoryview(buffer)[: nbytes or None]])[0]

    def recvmsg_into(
        self, buffers: Iterable[Any], ancbufsize: int = 0, flags: int = 0
    ) -> tuple[int, list[tuple[int, int, bytes]], int, Any]:
        """Receive what is there, or what one system call brings, decrypted straight into the buffers."""
        filled = 0
        for buffer in buffers:
            view = memoryview(buffer)
            while view:
                received = self._read_into(view, may_receive=not filled)
                if not received:
                    return filled, [], 0, None
                filled += received
                view = view[received:]
        return filled, [], 0, None

    def send(self, data: Any, flags: int = 0) -> int:
        return self.sendmsg((data,))

    def sendmsg(self, buffers: Iterable[Any], ancdata: Any = (), flags: int = 0, address: Any = None) -> int:
        views = [memoryview(buffer) for buffer in buffers]
        if sum(map(len, views)) < self._unsent_of:
            raise ssl.SSLError("these are fewer bytes than could not be sent completely before")
        if self._unsent and not self._has_sent():
            raise BlockingIOError
        sent, self._unsent_of = self._unsent_of, 0
        for piece in islice(_pieces(views, sent), CALLS_PER_SEND):
            self._unsent_of = self._tls.write(piece)
            self._unsent = self._outgoing.read()
            if not self._has_sent():
                break
            sent += self._unsent_of
            self._unsent_of = 0
        if not sent and self._unsent:
            raise BlockingIOError
        return sent

    def send_plain(self, data: bytes) -> None:
        """Send to a client that does not use TLS, which has sent something already."""
        with suppress(OSError):
            super().send(data)
            super().recv(ENCRYPTED_BYTES)  # unread bytes would make closing a reset, which takes the answer along
            super().shutdown(socket.SHUT_WR)

    def shutdown(self, how: int) -> None:
        if not (self._incoming.pending or self._tls.pending()):  # ssl would take what is unread for a violation of TLS
            self._notify()
        super().shutdown(how)

    def close(self) -> None:
        self._notify()
        super().close()

    sendall = sendto = sendfile = _WITHOUT_TLS
    recvfrom = recvfrom_into = recvmsg = makefile = _WITHOUT_TLS

    def _receive(self) -> None:
        """Take what the system has received. BlockingIOError if that is nothing."""
        encrypted = super().recv(ENCRYPTED_BYTES)
        if encrypted:
            self._incoming.write(encrypted)
        elif self._broke is not None:
            raise self._broke
        else:
            self._incoming.write_eof()

    def _decrypt(self) -> None:
        """Decrypt what is there."""
        pieces = []
        try:
            while piece := self._tls.read(RECORD_BYTES):
                pieces.append(piece)
                if not self._incoming.pending:
                    break
            else:
                self._end = bytes
        except ssl.SSLWantReadError:
            pass
        except OSError as error:
            self._ended_by(error)
        self._received = b"".join(pieces)

    def _read_into(self, view: memoryview, may_receive: bool) -> int:
        """Decrypt at most a record into the view; return 0 at the end, or if there is nothing and more may not be
        received. BlockingIOError if the system has nothing, or one call brought no whole record of the caller's: a peer
        that sends others only, as new keys, would keep this thread."""
        if self._received:
            taken = self._received[: len(view)]
            view[: len(taken)] = taken
            self._received = self._received[len(taken) :]
            return len(taken)
        has_received = False
        while self._end is None:
            try:
                read: int = self._tls.read(len(view), view)  # type: ignore[assignment]  # typeshed knows no buffer
            except ssl.SSLWantReadError:
                self._reply()
                if not may_receive:
                    return 0
                if self._end is None:
                    if has_received:
                        raise BlockingIOError from None
                    self._receive()
                    has_received = True
            except OSError as error:
                self._ended_by(error)
            else:
                self._reply()
                if read:
                    return read
                self._end = bytes
        return len(self._end()) if may_receive else 0

    def _ended_by(self, error: OSError) -> None:
        """Note an error of TLS as the end."""
        if isinstance(error, ssl.SSLEOFError):
            self._end = bytes  # without close_notify: what is whole, the caller knows by the lengths of its messages
        else:
            self._end = partial(_raise, error)
            self._send_alert()

    def _reply(self) -> None:
        """Send what TLS itself has to answer, as to a new key: a peer that takes none of it may not demand more."""
        if self._outgoing.pending:
            self._unsent += self._outgoing.read()
            try:
                self._has_sent()
            except OSError as error:
                self._broke = error
            if len(self._unsent) > 2 * ENCRYPTED_BYTES:
                self._end = partial(_raise, ssl.SSLError("the peer demands more replies than it takes"))

    def _has_sent(self) -> bool:
        """Send encrypted bytes; True if the system has taken all."""
        try:
            self._unsent = self._unsent[super().send(self._unsent) :]
        except BlockingIOError:
            return False
        return not self._unsent

    async def _flush(self) -> None:
        self._unsent += self._outgoing.read()
        while self._unsent and not self._has_sent():
            await wait_writable(self)

    def _send_alert(self) -> None:
        """Send what TLS has to say after an error, if that does not have to wait."""
        try:
            if not self._unsent:
                super().send(self._outgoing.read())
        except BlockingIOError:
            pass
        except OSError as error:
            self._broke = error

    def _notify(self) -> None:
        """Send that nothing follows (close_notify), if that does not have to wait; the peer's is not waited for."""
        if self._notified:
            return
        self._notified = True
        with suppress(OSError, ValueError):
            self._tls.unwrap()
        self._send_alert()


def share_interpreter() -> None:
    """Have threads that compute in Python give up the interpreter soon when others wait for it.

    Each record releases the interpreter when it is decrypted. With Python's 5 ms, KV moves at 40 % of the speed while
    an engine's thread computes (`benchmarks/busy_thread.py`).
    """
    sys.setswitchinterval(min(SWITCH_S, sys.getswitchinterval()))


def is_sending(sock: socket.socket) -> bool:
    """True if a call that sent nothing has begun to: see TlsSocket."""
    return isinstance(sock, TlsSocket) and sock.is_sending


def is_buffered(sock: socket.socket) -> bool:
    """True if the socket has decrypted bytes that were not received yet: the system does not report those."""
    return isinstance(sock, TlsSocket) and sock.is_buffered


def is_refusal(error: OSError) -> bool:
    """Whether a handshake has failed by what one side presented, and not by the end of the connection."""
    return isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError)


def _raise(error: OSError) -> bytes:
    raise error


def _pieces(views: Iterable[memoryview], skipped: int) -> Iterator[memoryview | bytes]:
    """Return what is to be encrypted call by call: all bytes of the views in their order, but for the first so many."""
    small: list[memoryview] = []
    """These share a call, and records: each by itself would cost as much as a whole one."""
    total = 0
    for view in views:
        at, skipped = min(skipped, len(view)), max(0, skipped - len(view))
        while at < len(view):
            taken = view[at : at + ENCRYPTED_BYTES - total]
            at += len(taken)
            if len(taken) == ENCRYPTED_BYTES:
                yield taken
                continue
            small.append(taken)
            total += len(taken)
            if total == ENCRYPTED_BYTES:
                yield b"".join(small)
                small, total = [], 0
    if small:
        yield b"".join(small)


def accepted_with(context: ssl.SSLContext, sock: socket.socket) -> TlsSocket:
    """Return a connected, non-blocking socket as the server's end of a connection with TLS."""
    return TlsSocket(context, sock, None)


def opened_with(context: ssl.SSLContext, sock: socket.socket, host: str) -> TlsSocket:
    """Return the same for the client's end. `host` is the name that the server's certificate must have."""
    return TlsSocket(context, sock, host)


def failure_text(error: ssl.SSLError, authority: str = "", peer: str = "server") -> str:
    """Return why there is no TLS with the peer, and what to do. `authority`: where the file with the peers' authority
    is set; needed for errors of a handshake only."""
    reason = (error.reason or str(error)).replace("_", " ").lower()
    if isinstance(error, ssl.SSLCertVerificationError):
        text = f"certificate verify failed: {error.verify_message.rstrip('.')}"
        if error.verify_code in _WRONG_TIME:
            return f"{text}: renew the {peer}'s certificate, or correct this host's clock"
        if error.verify_code in _WRONG_NAME:
            return f"{text}; use a name that the {peer}'s certificate has"
        return f"{text}; {authority} names the file with its authority"
    if reason in ("wrong version number", "http request"):
        return f"the {peer} does not use TLS"
    if isinstance(error, ssl.SSLEOFError):
        return f"the {peer} closed the connection in the middle of the handshake; does it use TLS?"
    alert = reason.partition(" alert ")[2]
    if any(text in alert for text in ABOUT_CERTIFICATES):
        return f"the {peer} refuses this side's certificate: {alert}"
    return f"the {peer} ended the connection: {alert}" if alert else reason


def client_context() -> ssl.SSLContext:
    """Return the context of clients that verify the server. Authorities are the system's, or those of the file that the
    environment's SSL_CERT_FILE names."""
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context
