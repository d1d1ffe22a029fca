"""The transport between GPUs and hosts by NIXL (UCX): the receiver fetches, by NIXL's READ.

NIXL has no way to refuse a peer's WRITE once it has been let in, nor to stop what has begun (nixl #2067, #2044; tried:
54 of 64 MiB landed after the remote agent was removed and the handle released). So no peer is let in: a WRITE is a
message on a TCP stream of ours, at which the memory's owner READs the pieces, reports the notice and answers. Old
generations are refused here, as over shm, at the price of half a round trip. A READ that has begun ends by itself: a
fence waits for that, or for the end of the peer, which NIXL reports as an error of the READ.

No thread of NIXL's polls (it would burn half a core): the agent that fetches polls, and so does the one that is fetched
from, for as long as a WRITE of it is unanswered or a reader has said that it reads. Over some of UCX's transports (TCP,
and the first contact over any) bytes move only while both poll.

Memory is this process's or, adopted, a GPU's; a READ of NIXL's is between memory of one kind and of one kind. UCX
chooses its transports by its own variables: UCX_NET_DEVICES=lo keeps it on this machine. It leaves out cuda_ipc,
without an error, where the thread that calls it has no current CUDA context (vllm#36475); so each call attaches to the
GPU first. It also leaves out cuda_ipc for READs where it finds no active NVLink (ucx #7566, nixl #2208), and copies
through the host and TCP then. So READs by cuda_ipc are switched on, unless the variable is set already.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

import trio

from pdflow.layout.descriptors import Descriptor
from pdflow.protocol.values import Address
from pdflow.protocol.wire.limits import MAX_NAME_BYTES
from pdflow_runtime.gpu import driver
from pdflow_runtime.security.tls import Tls
from pdflow_runtime.transports.adopting import AdoptedRegion, Segment
from pdflow_runtime.transports.base import EventSink, MissingBackend, TransportError
from pdflow_runtime.transports.registered import (
    LibraryFetch,
    MemoryTable,
    RegisteredAgent,
    RemoteMemory,
    of_one_kind,
    with_words,
)
from pdflow_runtime.transports.streams.links import AgentLink, Guest, Remote
from pdflow_runtime.transports.streams.messages import (
    MAX_HELLO_BYTES,
    ReadOver,
    ReadRequest,
    ReadWordRequest,
    frame,
)
from pdflow_runtime.transports.streams.stream import OutgoingMessage, StreamBrokenError

log = logging.getLogger(__name__)

POLL_S: Final = 0.0002
"""The pause between two polls while something is in flight."""
INLINE_BYTES: Final = 128 << 10
INLINE_PIECES: Final = 64
READ_BY_CUDA_IPC: Final = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"
INSTALL: Final = "pip install --no-deps nixl==1.5.1 nixl-cu12==1.5.1 (with a torch for CUDA 13: nixl-cu13==1.5.1)"


def require() -> None:
    """Raise MissingBackend if NIXL is not installed. It is not imported yet, which takes a second."""
    if find_spec("nixl") is None:
        raise MissingBackend(f"the transport 'nixl' needs NIXL: {INSTALL}")


class NixlAgent:
    """A wrapper of our NIXL agent: one call at a time, and NIXL's errors become TransportError. Where memory lies on a
    GPU, every thread that calls has attached to it."""

    def __init__(self, name: str) -> None:
        try:
            self._library: Final[Any] = import_module("nixl._api")
        except ImportError as error:
            raise MissingBackend(f"the transport 'nixl' needs NIXL ({error}): {INSTALL}") from None
        # It would print on stdout, where its user's first line is somebody's address.
        theirs = logging.getLogger("nixl")
        theirs.handlers.clear()
        theirs.propagate = True
        theirs.setLevel(logging.WARNING)
        self._name: Final = name
        self._lock: Final = threading.Lock()
        self._agent: Any = None
        self._gpu: int | None = None
        """The GPU of the memory that is registered, or the first of several; None if all of it is this process's."""
        self._known: Counter[str] = Counter()
        """By remote agent, how many streams have brought its metadata."""

    def register(self, segments: Sequence[Segment]) -> None:
        """Register the first memory, and make NIXL's agent, whose UCX looks for GPUs as it begins; or register more."""
        if self._agent is None:
            self._gpu = next((segment.gpu for segment in segments if segment.gpu is not None), None)
            if self._gpu is not None:
                os.environ.setdefault(READ_BY_CUDA_IPC, "on")  # UCX reads it when its agent is made.
            self._attach()
            try:
                config = self._library.nixl_agent_config(enable_prog_thread=False)
                self._agent = self._library.nixl_agent(self._name, config)
            except Exception as error:  # NIXL's errors have no base of their own
                raise TransportError(f"NIXL: {error or type(error).__name__}") from None
        for on_gpu in (False, True):
            chosen = [segment for segment in segments if (segment.gpu is not None) == on_gpu]
            if chosen:
                rows = [(segment.address, segment.nbytes, segment.gpu or 0, "") for segment in chosen]
                self._call("register_memory", rows, _kind(on_gpu))

    def _attach(self) -> None:
        """Have the GPU's context current in this thread. Cheap if it is already."""
        if self._gpu is not None:
            try:
                driver.attach(self._gpu)
            except driver.GpuError as error:
                raise TransportError(f"NIXL cannot use GPU {self._gpu}: {error}") from None

    def metadata(self) -> bytes:
        """Return the metadata by which peers reach the memory that is registered."""
        metadata: bytes = self._call("get_agent_metadata")
        return metadata

    def add(self, metadata: bytes) -> str:
        name = self._call("add_remote_agent", metadata).decode()
        self._known[name] += 1
        return str(name)

    def remove(self, name: str) -> None:
        self._known[name] -= 1
        if not self._known[name]:
            del self._known[name]
            with contextlib.suppress(TransportError):
                self._call("remove_remote_agent", name)

    def begin_read(self, targets: MemoryTable, sources: MemoryTable, remote: str, *, wait: bool = True) -> Any:
        """Begin a READ between tables of one kind and return its handle, to be asked about with `ended` until it has
        ended. May itself take as long as the bytes.

        None if somebody else calls NIXL just now, and we are not to wait.
        """
        if not self._lock.acquire(blocking=wait):
            return None
        try:
            self._attach()
            local, there = (self._agent.get_xfer_descs(t.rows, _kind(t.on_gpu[0])) for t in (targets, sources))
            handle = self._agent.initialize_xfer("READ", local, there, remote)
            self._agent.transfer(handle)
        except Exception as error:
            raise TransportError(f"NIXL: {error}") from None
        finally:
            self._lock.release()
        return handle

    def ended(self, handle: Any) -> bool | None:
        """True if a READ has ended well, False if it has failed; None while it runs."""
        with self._lock:
            self._attach()
            self._agent.update_notifs()
            try:
                state = self._agent.check_xfer_state(handle)
            except Exception as error:
                log.info("NIXL: %s", error)
                state = "ERR"
            if state == "PROC":
                return None
            with contextlib.suppress(Exception):  # It has ended, and is released with the agent at the latest.
                self._agent.release_xfer_handle(handle)
            return bool(state == "DONE")

    def close(self) -> None:
        """Release the NIXL agent: peers that still fetch from here learn that it is gone."""
        with self._lock:
            if self._agent is not None:
                self._attach()
            self._agent = None

    def poll(self) -> None:
        """Let peers fetch. Skipped while another thread holds the lock, as its call polls anyway."""
        if self._lock.acquire(blocking=False):
            try:
                if self._agent is not None:
                    self._attach()
                    self._agent.update_notifs()
            finally:
                self._lock.release()

    def _call(self, function: str, *args: Any) -> Any:
        with self._lock:
            if self._agent is None:
                raise TransportError("this agent is closed")
            try:
                self._attach()
                return getattr(self._agent, function)(*args)
            except Exception as error:
                raise TransportError(f"NIXL: {error or type(error).__name__}") from None


def _kind(on_gpu: bool) -> str:
    return "VRAM" if on_gpu else "DRAM"


class NixlFetch(LibraryFetch):
    """A READ by NIXL. It cannot be stopped once it has begun."""

    __slots__ = ()
    _local: NixlAgent

    async def run(self) -> None:
        for sources, targets in of_one_kind(self._sources, self._targets):
            if self.halted or self.failed or not len(targets.rows):
                return
            await self._run(sources, targets)

    async def _run(self, sources: MemoryTable, targets: MemoryTable) -> None:
        rows = targets.rows
        small = len(rows) <= INLINE_PIECES and rows[:, 1].sum() <= INLINE_BYTES
        try:
            # Over shared memory a small READ has ended when it has begun, in less time than a thread takes to wake.
            handle = self._begin(sources, targets, False) if small else None
            landed = self._local.ended(handle) if handle is not None else None
            if landed is None:
                with trio.CancelScope(shield=True):  # What has begun goes on whether anybody waits or not.
                    landed = await trio.to_thread.run_sync(self._fetch, sources, targets, handle)
        except TransportError as error:
            log.info("a READ of %s failed: %s", self.peer, error)
            landed = False
        self.failed = not (landed or self.halted)

    def _begin(self, sources: MemoryTable, targets: MemoryTable, wait: bool) -> Any:
        return self._local.begin_read(targets, sources, self.remote.name, wait=wait)

    def _fetch(self, sources: MemoryTable, targets: MemoryTable, handle: Any) -> bool:
        handle = handle if handle is not None else self._begin(sources, targets, True)
        pause = threading.Event()
        while (ended := self._local.ended(handle)) is None:
            pause.wait(POLL_S)
        return ended


class NixlTransport(RegisteredAgent):
    """The transport over NIXL. Args: `host`, an address of this machine that peers can reach, for the streams of
    messages."""

    name: Final = "nixl"

    def __init__(self, me: Address, on_event: EventSink, host: str = "127.0.0.1", tls: Tls | None = None) -> None:
        super().__init__(me, on_event, host, tls)
        self._local: Final = NixlAgent(f"{me}-{self.incarnation:x}")
        self._reading: Counter[Guest] = Counter()
        """By guest, how many READs of our memory it has under way."""
        self._detached: set[AgentLink] = set()
        """Links to forgotten peers that may still be fetching."""
        self._bell = trio.Event()

    def adopt(self, segments: Sequence[Segment], own_bytes: int) -> memoryview:
        """Use memory that somebody else has allocated, of this process or on GPUs; see `transports/adopting.py`."""
        if own_bytes < 0:
            raise TransportError(f"cannot allocate a region of {own_bytes} bytes")
        whole, words_at = with_words(own_bytes)
        memory = AdoptedRegion(segments, whole[:own_bytes])
        self._local.register(memory.adopted)
        own = self._over(whole, memory, words_at)
        described_bytes = len(self.describe())
        if described_bytes > MAX_HELLO_BYTES - MAX_NAME_BYTES - 64:
            self._shut()
            raise TransportError(
                f"a description of {len(segments)} segments has {described_bytes:,} bytes; peers accept at most "
                f"{MAX_HELLO_BYTES:,}: adopt fewer and larger segments"
            )
        return own

    def join(self, owner: RegisteredAgent) -> memoryview:
        if isinstance(owner._memory, AdoptedRegion):
            self._local.register(owner._memory.adopted)
        return super().join(owner)

    def _register(self, whole: memoryview, address: int) -> bytes:
        self._local.register([Segment(address, len(whole))])
        return self._local.metadata()

    def _add(self, metadata: bytes) -> str:
        return self._local.add(metadata)

    def _let_be(self, remote: Remote | None) -> None:
        assert isinstance(remote, RemoteMemory)
        self._local.remove(remote.name)

    def _fetch(
        self,
        owner: object,
        peer: Address,
        generation: int,
        remote: RemoteMemory,
        sources: MemoryTable,
        targets: MemoryTable,
    ) -> NixlFetch:
        return NixlFetch(owner, peer, generation, self._local, remote, sources, targets)

    # Whoever is fetched from has to poll, too.

    def _fetching(self, link: AgentLink, op: int) -> None:
        link.stream.post(OutgoingMessage(frame(ReadRequest(op, b""))))

    def _fetched(self, link: AgentLink, op: int) -> None:
        super()._fetched(link, op)
        link.stream.post(OutgoingMessage(frame(ReadOver(op))))
        if link in self._detached:
            link.stream.close()

    def _serve_read(self, guest: Guest, message: ReadRequest | ReadWordRequest | ReadOver) -> None:
        if isinstance(message, ReadWordRequest):
            raise StreamBrokenError("the peer asked for a lease word, which over this transport it must read")
        self._reading[guest] += 1 if isinstance(message, ReadRequest) else -1
        self._bell.set()

    def write(
        self, op: int, peer: Address, pieces: Sequence[Descriptor], generation: int, notification: bytes | None
    ) -> None:
        super().write(op, peer, pieces, generation, notification)
        self._bell.set()

    def _detach(self, link: AgentLink) -> None:
        """Keep a forgotten peer's stream open as long as one side still fetches: by it the other sees how long it must
        poll."""
        self._detached.add(link)
        if not any(motion.owner is link for motion in self._motions):
            link.stream.end_sending()

    def _hide(self) -> None:
        self._local.close()

    async def _attend(self) -> None:
        while True:
            while self._is_fetched_from():
                self._local.poll()
                await trio.sleep(POLL_S)
            self._bell = trio.Event()
            await self._bell.wait()

    def _is_fetched_from(self) -> bool:
        for guest in [guest for guest in self._reading if guest not in self._guests]:
            del self._reading[guest]
        self._detached = {link for link in self._detached if not link.stream.closed}
        posted = any(link.writes for link in self._links.values())
        return posted or bool(self._closing or self._detached) or any(reads > 0 for reads in self._reading.values())
