"""Faults that the exploration of data paths may find."""

from __future__ import annotations

from enum import Enum


class Finding(Enum):
    """A kind of fault, in words for the table."""

    SKIPPED = "a skipped layer"
    INDEX = "an index past the first chunk"
    DEAF = "a dead listener"
    RING = "a ring deadlock"
    PEER = "a wait for a dead peer"
    GROUPS = "a deadlock between groups"
    SALT = "a salted key"
    TWICE = "memory given out twice"
    STALE = "bytes of another request read"
    KEPT = "memory not released at the end"
    STUCK = "a request that cannot end"
    OVERTAKEN = "a request overtaken"
    ANSWER = "a call not answered once"
    FREED = "memory freed while it is in use"
    CRASH = "an exception"
