"""The network of a hand-made cluster: frames, handshakes, operations, flushes and fences that a test carries out.

Nothing happens by itself. What endpoints want waits in `pending` until `run` carries it out, first come, first served;
what `holding` names stays where it is. A frame's kind is its message's class; the others are "handshake", "WRITE",
"READ", "word", "flush" and "fence".
"""

from __future__ import annotations

from typing import Any

from pdflow.protocol.effects import (
    BumpWord,
    Fence,
    Flush,
    Handshake,
    PostRead,
    PostWrite,
    ReadWord,
    Send,
)
from pdflow.protocol.events import (
    FenceEnded,
    FlushEnded,
    HandshakeEnded,
    ReadEnded,
    Received,
    WordRead,
    WriteEnded,
)
from pdflow.protocol.ids import engine_of


class Item:
    """Something under way. `kind` is its message's class, or what it is."""

    def __init__(self, kind: str, node: str, peer: str, what: Any = None) -> None:
        self.kind = kind
        self.node = node
        self.peer = peer
        self.what = what

    def __repr__(self) -> str:
        return f"{self.kind} {self.node}->{self.peer}"


class Network:
    """Subclasses have the engines: `feed` hands an event to one of their endpoints."""

    def __init__(self) -> None:
        self.incarnations: dict[str, int] = {}
        """Of each engine."""
        self.pending: list[Item] = []
        self.holding: set[str] = set()
        """Kinds that `run` leaves where they are."""
        self.unreachable: set[str] = set()
        """Addresses, or engines, that no handshake reaches."""
        self.refusing: set[str] = set()
        """Addresses, or engines, where no process listens, so that a handshake is refused."""
        self.word_values: dict[tuple[str, int], int] = {}
        """By rank and index, as a reader finds them."""

    def feed(self, node: str, event: Any) -> list[Any]:
        raise NotImplementedError

    def begin(self, node: str, effect: Any) -> bool:
        """Put an effect of this endpoint under way. Whether it is one of the network's."""
        match effect:
            case Send(to=peer, message=message):
                received = Received(node, self.incarnations[engine_of(node)], message)
                self.pending.append(Item(type(message).__name__, node, peer, received))
            case Handshake(peer=peer):
                self.pending.append(Item("handshake", node, peer))
            case PostWrite(to=peer):
                self.pending.append(Item("WRITE", node, peer, effect))
            case PostRead(source=peer):
                self.pending.append(Item("READ", node, peer, effect))
            case ReadWord(source=peer):
                self.pending.append(Item("word", node, peer, effect))
            case Flush(peer=peer):
                self.pending.append(Item("flush", node, peer))
            case Fence(peer=peer):
                self.pending.append(Item("fence", node, peer))
            case BumpWord(lease_word=lease_word):
                self.word_values[node, lease_word.index] = lease_word.value + 1
            case _:
                return False
        return True

    def carry_out(self, item: Item, ok: bool = True) -> None:
        """Let one pending item happen."""
        self.pending.remove(item)
        node, peer, what = item.node, item.peer, item.what
        if item.kind == "handshake":
            names = {peer, engine_of(peer)}
            refused = bool(names & self.refusing)
            reached = ok and not refused and not names & self.unreachable
            incarnation = self.incarnations[engine_of(peer)] if reached else 0
            self.feed(node, HandshakeEnded(peer, reached, incarnation, refused))
        elif item.kind == "WRITE":
            if ok:
                self.feed(peer, Received(node, self.incarnations[engine_of(node)], what.notification))
            self.feed(node, WriteEnded(what.op, ok))
        elif item.kind == "READ":
            self.feed(node, ReadEnded(what.op, ok))
            if ok and what.notification is not None:
                self.feed(peer, Received(node, self.incarnations[engine_of(node)], what.notification))
        elif item.kind == "word":
            self.feed(node, WordRead(what.op, self.word_values.get((peer, what.index)) if ok else None))
        elif item.kind == "flush":
            self.feed(node, FlushEnded(peer, ok))
        elif item.kind == "fence":
            self.feed(node, FenceEnded(peer))
        else:
            self.feed(peer, what)

    def find(self, kind: str, node: str | None = None, peer: str | None = None) -> Item:
        """The oldest pending item of a kind."""
        for item in self.pending:
            if item.kind == kind and node in (None, item.node) and peer in (None, item.peer):
                return item
        raise AssertionError(f"no {kind} is pending, only {self.pending}")

    def has(self, kind: str) -> bool:
        return any(item.kind == kind for item in self.pending)

    def drop(self, kind: str, node: str | None = None, peer: str | None = None) -> None:
        self.pending.remove(self.find(kind, node, peer))

    def fail(self, kind: str, node: str | None = None, peer: str | None = None) -> None:
        self.carry_out(self.find(kind, node, peer), ok=False)

    def run(self) -> None:
        """Until nothing is pending but what is held."""
        for _ in range(10_000):
            item = next((i for i in self.pending if i.kind not in self.holding), None)
            if item is None:
                return
            self.carry_out(item)
        raise AssertionError(f"the cluster does not come to rest: {self.pending[:10]}")
