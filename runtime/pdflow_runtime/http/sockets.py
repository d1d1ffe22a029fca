"""Plain non-blocking sockets under trio: the system calls themselves, and trio only where they would block.

`trio.SocketStream` costs two checkpoints for each operation, about half of what relaying a chunk costs; here an
operation that the kernel takes at once is no checkpoint. A loop over such operations must yield by itself.
"""

from __future__ import annotations

import socket

import trio
from trio.lowlevel import notify_closing, wait_readable, wait_writable

from pdflow_runtime.tls_socket import is_buffered

RECEIVE_BYTES = 64 << 10


def listen(host: str, port: int, *, backlog: int = 1024, reuse_port: bool = False) -> socket.socket:
    """Return a listening socket; port 0 picks a free one. OSError where the address is taken or not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=backlog, reuse_port=reuse_port)
    listener.setblocking(False)
    return listener


async def connect(host: str, port: int) -> socket.socket:
    """Return a connected socket. OSError where no address of the host answers."""
    failure = OSError(f"{host} has no address")
    try:
        found = await trio.socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError:
        raise OSError(f"{host} is not a valid host name") from None
    for family, kind, _, _, address in found:
        sock = trio.socket.socket(family, kind)
        try:
            await sock.connect(address)
        except OSError as error:
            failure = error
            sock.close()
            continue
        except BaseException:
            sock.close()
            raise
        return tuned(socket.socket(fileno=sock.detach()))
    raise failure


def system_reason(error: OSError) -> str:
    """Return the system's reason for an error as text for people, without its number."""
    text = error.strerror or str(error) or type(error).__name__
    return text[:1].lower() + text[1:]


def tuned(sock: socket.socket) -> socket.socket:
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def receive_now(sock: socket.socket, most: int = RECEIVE_BYTES) -> bytes | None:
    """Return the bytes that are there: None for nothing yet, b"" for the end. OSError for a connection that broke."""
    try:
        return sock.recv(most)
    except (BlockingIOError, InterruptedError):
        return None


async def receive(sock: socket.socket, most: int = RECEIVE_BYTES) -> bytes:
    """Return the next bytes, b"" at the end; always a checkpoint. OSError for a connection that broke."""
    while True:
        if is_buffered(sock):
            await trio.lowlevel.checkpoint()
        else:
            await wait_readable(sock)
        data = receive_now(sock, most)
        if data is not None:
            return data


def send_now(sock: socket.socket, data: bytes | memoryview) -> int:
    """Send without waiting; return how many bytes the kernel took. OSError for a connection that broke."""
    try:
        return sock.send(data)
    except (BlockingIOError, InterruptedError):
        return 0


async def send_all(sock: socket.socket, data: bytes | memoryview) -> None:
    """Send all bytes; no checkpoint where the kernel takes all of them at once."""
    sent = send_now(sock, data)
    if sent == len(data):
        return
    rest = memoryview(data)[sent:]
    while rest:
        await wait_writable(sock)
        rest = rest[send_now(sock, rest) :]


def silent(sock: socket.socket) -> bool:
    """True if nothing has come and the peer has not hung up: only then an idle connection can be used again."""
    if is_buffered(sock):
        return False
    try:
        socket.socket.recv(sock, 1, socket.MSG_PEEK)  # TLS cannot peek: what has come is seen encrypted
    except (BlockingIOError, InterruptedError):
        return True
    except OSError:
        return False
    return False


def close(sock: socket.socket) -> None:
    """Close the socket. A task that waits for it gets trio.ClosedResourceError."""
    notify_closing(sock)
    sock.close()
