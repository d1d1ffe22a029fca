"""Faults that the exploration of routers may find."""

from __future__ import annotations

from enum import Enum


class RouterFinding(Enum):
    """A kind of fault, in words for the table."""

    DISPATCH = "a leg that must not be dispatched"
    ENGINE = "a leg at the wrong engine"
    ANSWER = "a client not answered rightly, and once"
    IDLE = "a request that no engine works on"
    NEEDLESS = "a needless failure or delay"
    OPEN = "a leg that is left open"
    COUNT = "a wrong count"
    MEMBER = "an engine that is wrongly in or out"
    TIMER = "a wrong time to wake up"
    REPORT = "a prefill that is not reported to D once"
    TOKEN = "P's first token not at each decode leg once"
    KEPT = "something kept at the end"
    STUCK = "a request that cannot end"
    CRASH = "an exception"
