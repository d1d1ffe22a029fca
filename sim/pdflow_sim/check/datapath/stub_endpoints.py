"""Endpoints as far as a core depends on them: what they may do, and no more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pdflow.protocol.effects import AnswerPrefill, Commit, Enqueue, FreeBlocks, Outcome, ReleaseBlocks, Resolve
from pdflow.protocol.events import (
    DecodeAborted,
    DecodeAdmitted,
    DecodeHit,
    DecodeQueued,
    PrefillAborted,
    PrefillFinished,
    PrefillQueued,
    SourceWithdrawn,
)
from pdflow.protocol.ids import EngineInfo, KvParams, Shards
from pdflow.protocol.messages import Code
from pdflow.protocol.values import Allocation, Instant
from pdflow_sim.check.datapath.findings import Finding
from pdflow_sim.check.search.forward import Violation

BLOCK_TOKENS: Final = 16
FOUND_TOKENS: Final = 20
"""What the store has of a prompt, if it has a beginning of it: a block and a quarter."""
SHARDS: Final = Shards(1, 1, BLOCK_TOKENS)


class StubEndpoint:
    """An endpoint without deadlines."""

    timed = False

    def wake_at(self) -> Instant | None:
        return None

    def unfinished(self) -> Mapping[Any, object]:
        return {}


class ConsumerStub(StubEndpoint):
    """The endpoint of a scheduler that fetches KV: it commits a request, or resolves it."""

    def __init__(self) -> None:
        self.open: dict[str, Allocation | None] = {}
        """Requests that have not ended, with their blocks, if they have some."""

    def handle(self, event: Any, now: Instant) -> tuple[Any, ...]:
        match event:
            case DecodeQueued():
                self.queued(event)
                self.open[event.request_id] = None
                return (Enqueue(event.request_id),)
            case DecodeAdmitted():
                self.admitted(event)
                self.open[event.request_id] = event.allocation
            case DecodeHit() | Commit():
                del self.open[event.request_id]
                return (Commit(event.request_id),)
            case DecodeAborted() | Resolve() if event.request_id in self.open:
                return self.ended(event.request_id, event.code)
        return ()

    def queued(self, event: DecodeQueued) -> None:
        """Check what is asked for. Raises Violation."""

    def admitted(self, event: DecodeAdmitted) -> None:
        """Check what is to be fetched. Raises Violation."""

    def ended(self, request_id: str, code: Code) -> tuple[Any, ...]:
        """End a request; its blocks are free when nothing can write to them any more, which is at once here."""
        blocks = self.open.pop(request_id)
        outcome = Outcome.CANCELLED if code is Code.CANCELLED else Outcome.FAILED
        resolved = Resolve(request_id, outcome, code)
        return (resolved,) if blocks is None else (resolved, FreeBlocks(blocks))


class PutEndpoint(StubEndpoint):
    """P's endpoint towards the store, as far as the core depends on it."""

    def __init__(self) -> None:
        self.known: dict[str, None] = {}
        """Prompts that are neither computed nor over."""
        self.held: dict[str, Allocation] = {}

    def handle(self, event: Any, now: Instant) -> tuple[Any, ...]:
        match event:
            case PrefillQueued():
                self.known[event.xid] = None
            case PrefillAborted():
                if event.xid not in self.known:
                    raise Violation(Finding.ANSWER, f"{event.xid} is ended, and is not open")
                del self.known[event.xid]
            case PrefillFinished():
                if event.xid not in self.known:
                    raise Violation(Finding.ANSWER, f"{event.xid} is computed, and is not open")
                del self.known[event.xid]
                self.held[event.xid] = event.allocation
                return (AnswerPrefill(event.xid, params_of(event.xid, event.num_tokens)),)
            case SourceWithdrawn() if event.xid in self.held:
                return (ReleaseBlocks(event.xid, self.held.pop(event.xid), Code.CANCELLED),)
            case ReleaseBlocks():
                del self.held[event.xid]
                return (event,)
        return ()


class LoadEndpoint(ConsumerStub):
    """P's endpoint that loads from the store."""

    def queued(self, event: DecodeQueued) -> None:
        if event.num_blocks != -(-event.params.num_tokens // BLOCK_TOKENS):
            raise Violation(Finding.INDEX, f"{event.request_id} asks for {event.num_blocks} blocks")

    def admitted(self, event: DecodeAdmitted) -> None:
        if (event.token_start, event.token_start + event.num_tokens) != (0, FOUND_TOKENS):
            raise Violation(Finding.INDEX, f"{event.request_id} loads {event.num_tokens} tokens")


def params_of(xid: str, num_tokens: int) -> KvParams:
    return KvParams(EngineInfo("store.get", SHARDS), xid, f"r{xid[1:]}", num_tokens)
