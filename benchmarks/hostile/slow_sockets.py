"""Slow sockets, in a process of their own: python -m benchmarks.hostile.slow_sockets HOST:PORT SOCKETS."""

from __future__ import annotations

import random
import resource
import select
import socket
import sys
import time

REOPENED_PER_S = 200
BYTE_EVERY_S = 5.0


class SlowSockets:
    """Opens sockets, and sends on each a byte of a request every few seconds."""

    def __init__(self, host: str, port: int, most: int) -> None:
        self.address = host, port
        self.most = most
        self.open: dict[int, socket.socket] = {}
        self.poll = select.epoll()
        self.opened = self.closed = 0

    def add(self) -> None:
        sock = socket.socket()
        try:
            sock.connect(self.address)
            sock.setblocking(False)
            sock.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Slow: ")
        except OSError:
            sock.close()
            self.closed += 1
            return
        self.open[sock.fileno()] = sock
        self.poll.register(sock.fileno(), select.EPOLLIN | select.EPOLLHUP)
        self.opened += 1

    def reap(self, wait_s: float) -> None:
        """Close what the server has closed."""
        for fd, _ in self.poll.poll(wait_s):
            self.drop(fd)

    def drop(self, fd: int) -> None:
        sock = self.open.pop(fd, None)
        if sock is not None:
            self.poll.unregister(fd)
            sock.close()
            self.closed += 1

    def run(self) -> None:
        while self.opened < self.most:
            self.add()
            self.reap(0)
        sys.stdout.write(f"{self.opened:,} slow sockets were opened; {len(self.open):,} of them are open at once\n")
        sys.stdout.flush()
        step_s = 0.05
        while not select.select([sys.stdin], [], [], 0)[0]:
            for fd in random.sample(list(self.open), int(len(self.open) * step_s / BYTE_EVERY_S)):
                try:
                    self.open[fd].send(b"s")
                except OSError:
                    self.drop(fd)
            for _ in range(min(int(REOPENED_PER_S * step_s), self.most - len(self.open))):
                self.add()
            self.reap(0)
            time.sleep(step_s)
        sys.stdout.write(f"{self.opened:,} slow sockets in all, {self.closed:,} of them closed by the router\n")


def main() -> None:
    host, _, port = sys.argv[1].rpartition(":")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    SlowSockets(host, int(port), int(sys.argv[2])).run()


if __name__ == "__main__":
    main()
