"""Prompts whose blocks are written from while they are computed (vLLM #55589): what of them may go, and when their
blocks are free.

What has begun is computed to its end, even if nobody wants it any more: a WRITE may read its blocks until then. How its
pieces come about, and what their going takes, is the host's.
"""

from __future__ import annotations

from pdflow.protocol.values import Xid


class InPlace:
    __slots__ = ("_known", "_released")

    def __init__(self) -> None:
        self._known: dict[Xid, int] = {}
        """Of prompts that have begun and are not all computed: up to which token they are, or will be with a step."""
        self._released: set[Xid] = set()
        """Of these, let go of by the protocol."""

    def __contains__(self, xid: Xid) -> bool:
        """Whether it has begun, and is not all computed."""
        return xid in self._known

    def begins(self, xid: Xid) -> bool:
        """Whether the step that begins is the first with a part of it: then it is to be announced."""
        if xid in self._known:
            return False
        self._known[xid] = 0
        return True

    def advance(self, xid: Xid, known: int) -> int:
        """With this step so many tokens are known. From which on its pieces are new."""
        before, self._known[xid] = self._known[xid], known
        return before

    def goes(self, xid: Xid) -> bool:
        """Whether a piece of it may be sent, if it is still here."""
        return xid not in self._released

    def computed(self, xid: Xid) -> bool:
        """All of it is. Whether its blocks are free now, as nobody holds it any more."""
        del self._known[xid]
        if xid not in self._released:
            return False
        self._released.remove(xid)
        return True

    def release(self, xid: Xid) -> bool:
        """The protocol lets go of it. Whether its blocks are free now."""
        if xid not in self._known:
            return True
        self._released.add(xid)
        return False

    def assert_empty(self, whose: str) -> None:
        assert not self._known, f"{whose} still computes {list(self._known)}"
        assert not self._released, f"{whose} still keeps {self._released}"
