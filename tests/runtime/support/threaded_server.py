"""A server in threads, for clients that block."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pdflow_runtime.http.sockets import listen


@contextmanager
def threaded_server(serve: Callable[[socket.socket], None]) -> Iterator[int]:
    """The port of a server whose connections `serve` handles and closes, each in a thread of its own."""
    handlers: list[threading.Thread] = []

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            handlers.append(threading.Thread(target=serve, args=(connection,)))
            handlers[-1].start()

    with listen("127.0.0.1", 0) as listener:
        listener.setblocking(True)
        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
    for handler in handlers:
        handler.join()
