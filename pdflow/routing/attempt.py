"""The state of one attempt of a request: a pair of legs with ids of its own, and which of them are open."""

from __future__ import annotations

from collections.abc import Hashable

from pdflow.routing.events import RequestArrived


class Attempt:
    """The pair of legs of one attempt. A leg is open from its dispatch to its end; engine -1 stands for no leg."""

    __slots__ = (
        "asked",
        "avoid_d",
        "d",
        "d_open",
        "number",
        "p",
        "p_open",
        "prefill_only",
        "request",
        "request_id",
        "started",
        "xid",
    )

    def __init__(self, request: int, number: int, p: int, asked: RequestArrived, avoid_d: int | None) -> None:
        self.request = request
        self.asked = asked
        self.number = number
        self.request_id = f"r{request}.{number}"
        self.xid = f"x{request}.{number}"
        self.p = p
        self.d = -1
        self.p_open = True
        self.d_open = False
        self.prefill_only = asked.prefill_only
        self.started = False
        """The client has received a token of it, or of an attempt that it continues."""
        self.avoid_d = avoid_d
        """The decode engine of the previous attempt, to be avoided if there is another one."""

    def fork(self) -> Attempt:
        other = Attempt(self.request, self.number, self.p, self.asked, self.avoid_d)
        other.d, other.p_open, other.d_open, other.started = self.d, self.p_open, self.d_open, self.started
        return other

    def fingerprint(self) -> Hashable:
        avoid_d = self.avoid_d if self.d < 0 else None
        legs = self.p, self.d, self.p_open, self.d_open
        return self.request_id, self.number, *legs, self.prefill_only, avoid_d, self.started
