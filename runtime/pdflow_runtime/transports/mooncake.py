"""The transport between hosts by Mooncake's Transfer Engine (TCP or RDMA): the receiver fetches, by the engine's READ.

The engine cannot refuse a peer's WRITE that has begun: of one of 64 MiB whose target was unregistered after 4 MiB, all
64 landed, and it was reported as done. So its WRITE is not used: as over NIXL, a WRITE is a message on a TCP stream of
ours, at which the memory's owner READs, reports the notice and answers; old generations are refused there (`fences` is
revoke, `done_means` remote). Nor are the engine's notices: they are sent only by a polling sender, and reach only a
receiver that asks for them.

A piece is a batch of its own. A batch of many is reported as failed when its first piece has, while others still land,
and is waited for by spinning; the end of a single one is exact, can be asked for, and comes sooner.
A READ that is halted posts no further piece, and ends with those that were posted: when they have come, or the peer has
died, or after the 30 s in which the engine must see progress.

There is one engine in a process, for good: ending one holds Python's lock for a second. Its listeners cannot be bound
to one address, and let in whoever reaches them: it belongs in a network of its own. MOONCAKE_PROTOCOL (tcp, rdma) and
MOONCAKE_DEVICE say how it goes out, as they do for Mooncake's own tools.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections import Counter, deque
from functools import cache
from importlib import import_module
from typing import Any, Final

import trio

from pdflow.protocol.values import Address
from pdflow_runtime.transports.base import MissingBackend, TransportError
from pdflow_runtime.transports.copying import Mapped
from pdflow_runtime.transports.registered import LibraryFetch, MemoryTable, RegisteredAgent, RemoteMemory
from pdflow_runtime.transports.streams.links import Guest
from pdflow_runtime.transports.streams.messages import ReadOver, ReadRequest, ReadWordRequest
from pdflow_runtime.transports.streams.stream import StreamBrokenError

log = logging.getLogger(__name__)

INSTALL: Final = "apt-get install libibverbs1 && pip install --no-deps mooncake-transfer-engine-non-cuda==0.3.13.post1"
CAUTION: Final = "Mooncake listens on every address of this host without authentication: restrict access to its network"
POSTED: Final = 256
"""The most pieces of one READ that are posted at once. The engine would queue 1,024 for a peer, and fail what comes on
top."""
POLL_S: Final = 0.0001
_SETTINGS: Final = {
    "MC_LOG_LEVEL": "ERROR",
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",  # a peer's ranks share one queue
}
_SEGMENT = re.compile(rb"[0-9A-Za-z.:\[\]-]{1,255}:[0-9]{1,5}")


def require() -> Any:
    """Return the library. MissingBackend without it, or without what it needs itself."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        return import_module("mooncake.engine")
    except ImportError as error:
        raise MissingBackend(f"the transport 'mooncake' needs Mooncake ({error}): {INSTALL}") from None


def caution() -> str:
    return CAUTION


class MooncakeEngine:
    """This process's engine. Its calls may come from any thread, and let others run."""

    def __init__(self, host: str) -> None:
        self._engine: Final = require().TransferEngine()
        protocol, device = os.environ.get("MOONCAKE_PROTOCOL", "tcp"), os.environ.get("MOONCAKE_DEVICE", "")
        if self._engine.initialize(host, "P2PHANDSHAKE", protocol, device):
            raise TransportError(
                f"Mooncake failed to start on {host} over {protocol} (set MC_LOG_LEVEL=INFO for the reason)"
            )
        self.segment: Final = f"{host}:{self._engine.get_rpc_port()}"
        self._known: Final[Counter[int]] = Counter()
        """By address, how many agents have the memory registered."""
        self._kept: Final[list[memoryview]] = []
        """All memory that was ever registered: the engine may be serving a peer from it even after unregistering it."""

    def register(self, memory: memoryview, address: int) -> None:
        if not self._known[address] and self._engine.register_memory(address, len(memory)):
            raise TransportError(f"Mooncake failed to register {len(memory) >> 20:,} MiB of memory")
        self._known[address] += 1
        self._kept.append(memory)

    def unregister(self, address: int) -> None:
        self._known[address] -= 1
        if not self._known[address]:
            self._engine.unregister_memory(address)

    def post(self, segment: str, source: int, target: int, nbytes: int) -> int:
        """Post a READ of one piece and return its number; 0 if it cannot be posted."""
        return int(self._engine.batch_transfer_async_read(segment, [target], [source], [nbytes]))

    def ended(self, posted: int) -> bool | None:
        """True if a posted READ has ended well, False if it has failed; None while it runs. It must not be asked about
        again once it has ended."""
        state = self._engine.transfer_check_status(posted)
        return None if state in (0, -2) else state == 1


local_on = cache(MooncakeEngine)


class MooncakeFetch(LibraryFetch):
    """A READ by Mooncake's engine. Pieces that are posted cannot be taken back."""

    __slots__ = ()
    _local: MooncakeEngine

    async def run(self) -> None:
        if len(self._targets.rows) and not self.halted:
            with trio.CancelScope(shield=True):  # What is posted goes on whether anybody waits or not.
                landed = await trio.to_thread.run_sync(self._fetch)
            self.failed = not (landed or self.halted)

    def _fetch(self) -> bool:
        local, segment = self._local, self.remote.name
        sources, targets = self._sources.rows, self._targets.rows
        columns = (sources[:, 0], targets[:, 0], targets[:, 1])
        pieces = zip(*(column.tolist() for column in columns), strict=True)
        posted: deque[int] = deque()
        landed, pause = True, threading.Event()
        while True:
            while len(posted) < POSTED and landed and not self.halted and (piece := next(pieces, None)):
                number = local.post(segment, *piece)
                landed = bool(number)
                if number:
                    posted.append(number)
            if not posted:
                return landed
            ended = local.ended(posted[0])
            if ended is None:
                pause.wait(POLL_S)
            else:
                posted.popleft()
                landed = landed and ended


class MooncakeTransport(RegisteredAgent):
    """The transport over Mooncake. Args: `host`, an address of this machine that peers can reach, for the engine and
    for the streams of messages."""

    name: Final = "mooncake"

    def _register(self, whole: memoryview, address: int) -> bytes:
        self._local = local_on(self._host)
        self._local.register(whole, address)
        return self._local.segment.encode()

    def _add(self, metadata: bytes) -> str:
        if not _SEGMENT.fullmatch(metadata):
            raise TransportError("the peer's description of its Transfer Engine is not HOST:PORT")
        return metadata.decode()

    def _fetch(
        self,
        owner: object,
        peer: Address,
        generation: int,
        remote: RemoteMemory,
        sources: MemoryTable,
        targets: MemoryTable,
    ) -> MooncakeFetch:
        return MooncakeFetch(owner, peer, generation, self._local, remote, sources, targets)

    def _serve_read(self, guest: Guest, message: ReadRequest | ReadWordRequest | ReadOver) -> None:
        raise StreamBrokenError("the peer asked for bytes, which over this transport it must read")

    def _hide(self) -> None:
        if isinstance(self._memory, Mapped):
            self._local.unregister(self._memory.address)
