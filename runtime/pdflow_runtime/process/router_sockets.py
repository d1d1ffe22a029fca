"""The sockets at which the router listens: the port for clients and the cluster port, and how many connections each of
them keeps.

At the cluster port (serve.cluster_port) engines report and operators order. Its clients have a certificate of the
cluster's authority. A connection whose client has not shown one is among those without a whole request, which may be a
quarter of all: such clients replace each other and no engine. The connections of both ports are counted separately, so
those of clients replace no engine's either.
"""

from __future__ import annotations

import logging
import resource
import socket
from typing import Final

from pdflow.errors import Problem, ScenarioError
from pdflow.scenario.schema.scenario import ResolvedScenario
from pdflow_runtime.http.messages import HttpLimits
from pdflow_runtime.http.sockets import listen

log = logging.getLogger(__name__)

FILES_PER_CONNECTION: Final = 3
"""A client's socket, and those of its two legs."""
RESERVE: Final = 64
"""Further clients, which ask for health or are operators. Where descriptors are scarce there are none, and every client
waits."""
OTHER_FILES: Final = 32
"""Descriptors of the process itself."""
CLUSTER_SHARE: Final = 4
"""For so many connections of clients, the cluster port has one."""
NEW_SHARE: Final = 4
"""Of so many connections at the cluster port, one may be without a whole request, and so without a certificate."""
HANDSHAKE_S: Final = 5.0
"""The most that a handshake at the cluster port takes: the time that ranks have for theirs."""


class RouterSockets:
    """Args: the socket for clients, and that of the cluster port, if there is one."""

    def __init__(self, clients: socket.socket, cluster: socket.socket | None = None) -> None:
        self.clients: Final = clients
        self.cluster: Final = cluster
        self.port: Final[int] = clients.getsockname()[1]
        self.cluster_port: Final[int | None] = None if cluster is None else cluster.getsockname()[1]
        for each in self._all():
            each.setblocking(False)

    @property
    def descriptors(self) -> list[int]:
        """Return the file descriptors, in the order of `inherited`."""
        return [each.fileno() for each in self._all()]

    def close(self) -> None:
        for each in self._all():
            each.close()

    def _all(self) -> list[socket.socket]:
        return [self.clients] if self.cluster is None else [self.clients, self.cluster]


def opened(scenario: ResolvedScenario) -> RouterSockets:
    """Return new sockets at the router's addresses. ScenarioError if one cannot be listened on."""
    port, cluster_port = scenario.serve.port, scenario.serve.cluster_port
    clients = _listening(scenario, "port", port)
    try:
        return RouterSockets(
            clients, None if cluster_port is None else _listening(scenario, "cluster_port", cluster_port)
        )
    except ScenarioError:
        clients.close()
        raise


def inherited(descriptors: list[int]) -> RouterSockets:
    """Return the sockets that have these descriptors."""
    return RouterSockets(*(socket.socket(fileno=descriptor) for descriptor in descriptors))


def _listening(scenario: ResolvedScenario, key: str, port: int) -> socket.socket:
    host = scenario.serve.host
    try:
        return listen(host, port)
    except OSError as error:
        where = f"{host}:{port} cannot be listened on"
        raise ScenarioError([Problem(scenario.path, f"serve.{key}", f"{where}: {error.strerror}")]) from None


def limits_of(scenario: ResolvedScenario, body_bytes: int) -> HttpLimits:
    """Return the limits within which the router takes requests of clients, of at most so many bytes each."""
    serve_config = scenario.serve
    has_cluster_port = serve_config.cluster_port is not None
    most, allowed = serve_config.connections, connections_allowed(has_cluster_port)
    if most > allowed:
        needed = most + most // CLUSTER_SHARE if has_cluster_port else most
        log.warning(
            "serve.connections is %d, and the limit of open files (ulimit -n) is enough for %d: raise it to %d",
            *(most, allowed, needed * FILES_PER_CONNECTION + OTHER_FILES + RESERVE),
        )
    return HttpLimits(
        reserve=RESERVE if most <= allowed else 0,
        body_bytes=body_bytes,
        connections=min(most, allowed),
        connections_per_address=serve_config.connections_per_address,
    )


def cluster_limits_of(clients: HttpLimits) -> HttpLimits:
    """Return the limits at the cluster port, given those at the port for clients. All engines may have one address."""
    connections = max(2, clients.connections // CLUSTER_SHARE)
    return HttpLimits(
        reserve=clients.reserve,
        body_bytes=clients.body_bytes,
        connections=connections,
        new_connections=max(1, connections // NEW_SHARE),
        handshake_s=HANDSHAKE_S,
    )


def connections_allowed(has_cluster_port: bool = False) -> int:
    """Return how many clients the router can answer at once with the file descriptors that it may have, besides those
    at the cluster port."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = (limit - OTHER_FILES - (RESERVE if limit > 1024 else 0)) // FILES_PER_CONNECTION
    if has_cluster_port:
        allowed -= allowed // (CLUSTER_SHARE + 1)
    return max(1, allowed)
