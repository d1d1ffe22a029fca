"""Which connections a server keeps: the rule by which one gives way to another client, and what stays free for
operators.

A connection waits while no request of it is whole and none is being answered. Of those that wait, the one that has
gone longest without a whole request gives way first, though not while its first request may be on its way. If none
waits, the connection gives way whose client has taken nothing of its answer for longest, if that is a few seconds; no
other one with an answer under way does. Connections on which no request has ever been whole are limited by themselves:
clients that send slowly are all among these. Loopback is no address of a client: proxies on the same host connect from
it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from ipaddress import ip_address, ip_network
from itertools import islice
from typing import Final

from pdflow.protocol.values import S
from pdflow_runtime.clock import now_ns
from pdflow_runtime.http.connection import Connection
from pdflow_runtime.http.errors import OpenAIError
from pdflow_runtime.http.messages import HttpLimits, HttpRequest

COUNTED_BYTES: Final = 64 << 10
"""Shorter bodies are not counted: all connections together hold no more of them than they may."""

UNREAD_S: Final = 5.0
"""How long a connection is kept of which something was not read yet: more than the event loop is ever late."""
PAUSE_S: Final = 0.02
LOOKED_AT: Final = 64
"""Connections among which one is searched that can give way: of the oldest, some may be sending a long body."""


class ConnectionTable:
    """The connections of a server, and what each is doing."""

    def __init__(self, limits: HttpLimits) -> None:
        self.connections: Final[set[Connection]] = set()
        self._limits: Final = limits
        self._waiting: Final[dict[Connection, int]] = {}
        """When each began to wait; first the one that has gone longest without a whole request."""
        self._waiting_of: Final[dict[str, dict[Connection, None]]] = {}
        """The same, by address."""
        self._new: Final[dict[Connection, None]] = {}
        """Those of which no request has been whole yet, first the oldest."""
        self._of: Final[Counter[str]] = Counter()
        """Connections by address."""
        self._stalled: Final[dict[Connection, int]] = {}
        """Since when a client takes nothing of its answer, first the longest."""
        self._arriving: Final[dict[Connection, int]] = {}
        """Bytes of a body that is not whole, first the oldest."""
        self._arriving_bytes = 0
        self._answered_bytes = 0
        """Bodies of requests that are being answered."""

    def pause_s(self) -> float:
        """Return how long to wait before the next client can be connected, perhaps in place of another one: 0 for no
        time, infinity for until a connection ends or waits."""
        limits = self._limits
        if len(self._new) >= limits.new_connections:
            return 0.0 if self._can_give_way(self._new) else PAUSE_S
        if len(self.connections) < limits.connections:
            return 0.0
        if self._waiting:
            return 0.0 if self._can_give_way(self._waiting) else PAUSE_S
        if len(self.connections) < limits.connections + limits.reserve:
            return 0.0
        return self._until_given_up_s()

    def _until_given_up_s(self) -> float:
        """Return when the longest stalled client may be given up; infinity if none is stalled."""
        since_ns = next(iter(self._stalled.values()), None)
        return math.inf if since_ns is None else max(0.0, self._limits.stalled_s - (now_ns() - since_ns) / S)

    def _can_give_way(self, connections: Iterable[Connection]) -> Connection | None:
        """Return the first of these that wait, in the order of their age, that need not be kept."""
        for connection in islice(connections, LOOKED_AT):
            since_s = (now_ns() - self._waiting[connection]) / S
            if since_s < self._limits.fresh_s:
                return None
            if since_s >= UNREAD_S or not connection.unread:
                return connection
        return None

    @property
    def busy(self) -> bool:
        """True if so many requests are being answered that only those of operators are accepted."""
        return len(self.connections) - len(self._waiting) > self._limits.connections

    def admits(self, path: str) -> bool:
        """True if a request to that path may be answered now."""
        return not self.busy or any(
            path.startswith(reserved) if reserved.endswith("/") else path == reserved
            for reserved in self._limits.reserved
        )

    @contextmanager
    def answering(self, request: HttpRequest) -> Iterator[None]:
        """Count the request's body while the context is open. OpenAIError if the bodies of all requests that are being
        answered are too long together."""
        nbytes = len(request.body)
        if nbytes < COUNTED_BYTES:
            nbytes = 0
        elif self._answered_bytes + nbytes > self._limits.answered_bytes:
            raise OpenAIError(429, "too many long requests are being answered: try again later")
        self._answered_bytes += nbytes
        try:
            yield
        finally:
            self._answered_bytes -= nbytes

    def make_room(self, address: str) -> bool:
        """Close the connection that has to give way to a client from that address, if any has to. False if the client
        has too many and all of them are being answered."""
        most = self._limits.connections_per_address
        if most and address and self._of[address] >= most:
            own = self._can_give_way(self._waiting_of.get(address, ()))
            if own is None:
                return False
            self._evict(own)
        elif len(self._new) >= self._limits.new_connections:
            self._evict(self._can_give_way(self._new) or next(iter(self._new)))
        elif len(self.connections) >= self._limits.connections:
            self.evict()
        return True

    def evict(self) -> bool:
        """Close the connection that has gone longest without a whole request, or else the one whose client has taken
        nothing for longest; False if none may be closed."""
        oldest = self._can_give_way(self._waiting)
        if not self._waiting and not self._until_given_up_s():
            oldest = next(iter(self._stalled))
        if oldest is None:
            return False
        self._evict(oldest)
        return True

    def add(self, connection: Connection) -> None:
        self.connections.add(connection)
        self._of[connection.address] += 1
        self._new[connection] = None
        self.waits(connection)

    def remove(self, connection: Connection) -> None:
        """Forget a connection that has ended; no-op for one that gave way."""
        if connection not in self.connections:
            return
        self.connections.discard(connection)
        self._stalled.pop(connection, None)
        self.is_answered(connection)
        self._of[connection.address] -= 1
        if not self._of[connection.address]:
            del self._of[connection.address]

    def waits(self, connection: Connection) -> None:
        """Note that the connection has no whole request from now on."""
        if connection in self.connections:
            self._waiting[connection] = now_ns()
            self._waiting_of.setdefault(connection.address, {})[connection] = None

    def is_answered(self, connection: Connection) -> None:
        """Note that the connection has a whole request."""
        self._new.pop(connection, None)
        if self._waiting.pop(connection, None) is None:
            return
        own = self._waiting_of[connection.address]
        del own[connection]
        if not own:
            del self._waiting_of[connection.address]
        self._arriving_bytes -= self._arriving.pop(connection, 0)

    def holds(self, connection: Connection, nbytes: int) -> None:
        """Note how much is held of a body that is not whole, and close the oldest where all are too much."""
        before = self._arriving.get(connection, 0)
        if connection not in self._waiting or (nbytes < COUNTED_BYTES and not before):
            return
        self._arriving[connection] = nbytes
        self._arriving_bytes += nbytes - before
        while self._arriving_bytes > self._limits.arriving_bytes:
            self._evict(next(iter(self._arriving)))

    def stalls(self, connection: Connection, stalled: bool) -> None:
        """Note that the client takes nothing of its answer from now on, or takes more of it."""
        if not stalled:
            self._stalled.pop(connection, None)
        elif connection in self.connections:
            self._stalled[connection] = now_ns()

    def _evict(self, connection: Connection) -> None:
        self.remove(connection)
        connection.give_way()


def counted_address(host: str) -> str:
    """Return the address by which a client's connections are counted: of IPv6 its network of 64 bits, which one
    customer has; "" for loopback and Unix sockets."""
    try:
        found = ip_address(host.partition("%")[0])
    except ValueError:
        return ""
    if found.version == 6 and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    if found.is_loopback:
        return ""
    return str(found) if found.version == 4 else str(ip_network((found, 64), strict=False))
