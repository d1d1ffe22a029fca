"""A scope: a small cluster, its number of requests, and its budgets of faults."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import attrs

from pdflow.methods.catalogue import METHODS
from pdflow.protocol.dialect import STRICT, Dialect
from pdflow.protocol.timers import TimerKind

TOKENS = 32
"""Length of every prompt, in tokens."""
BLOCK_TOKENS = 16
ENDLESS = 1000


class FaultKind(IntEnum):
    """A kind of fault or other event that a budget limits. The value is its index in a state's budget."""

    DROP = 0
    DUP = 1
    ERR = 2
    UNREACHABLE = 3
    LOSE = 4
    ABORT = 5
    PREFILL_ABORT = 6
    P_RESTART = 7
    D_RESTART = 8
    SYNC = 9
    CANCEL = 10
    DEADLINE = 11
    STALL = 12
    DELAY = 13
    WITHDRAW = 14
    PREEMPT = 15
    REFUSED = 16


BUDGETED_TIMERS = {
    TimerKind.SYNC: FaultKind.SYNC,
    TimerKind.CANCEL: FaultKind.CANCEL,
    TimerKind.DEADLINE: FaultKind.DEADLINE,
    TimerKind.STALL: FaultKind.STALL,
}
"""Kinds of timers whose firings a budget limits. Others may fire whenever they are armed: each firing ends something.
"""


def budget(help_text: str, default: int = 0) -> Any:
    """Return a field of Scope that limits the FaultKind of the same name."""
    return attrs.field(default=default, metadata={"help": help_text}, validator=attrs.validators.ge(0))


def between(low: int, high: int) -> Any:
    return attrs.validators.and_(attrs.validators.ge(low), attrs.validators.le(high))


@attrs.frozen(kw_only=True)
class Scope:
    """P engines and D engines, all of a kind alike, and budgets. Events without a budget may happen any number of
    times."""

    dialect: Dialect = STRICT
    method: str = attrs.field(default="", validator=attrs.validators.in_(("", *METHODS)))
    """A transfer method's engines, memories and pieces (method_engines.py); "": blocks into blocks, whole or in
    `chunks`.
    """
    progressive: bool = False
    """The method writes blocks while the next are computed, as a scenario may ask of any method that writes them."""
    pulls: bool = False
    p_engines: int = attrs.field(default=1, validator=between(1, 2))
    d_engines: int = attrs.field(default=1, validator=between(1, 2))
    """Prompts go round the P engines, and requests round the D engines (cluster.py)."""
    p_tp: int = attrs.field(default=1, validator=between(1, 8))
    d_tp: int = attrs.field(default=1, validator=between(1, 8))
    requests: int = attrs.field(default=1, validator=between(1, 8))
    same_product: bool = False
    """All requests ask for one prompt: a retry beside its first attempt."""
    same_base: bool = False
    """Two prompts under one X-Request-Id: two dispatches with one base id."""
    pool: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    """How many requests D has blocks for at once; later ones get the same blocks. 0: each has blocks of its own. For a
    method whose KV lands in staging memory: for how many requests that memory has room."""
    p_pool: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    """For how many prompts P's staging memory has room; 0: for all."""
    pool_blocks: int = attrs.field(default=ENDLESS, validator=between(1, ENDLESS))
    """Blocks of D's pool as its endpoint counts them, where several P engines share it and none may bind too much."""
    d_block: int = attrs.field(default=BLOCK_TOKENS, validator=attrs.validators.in_((8, BLOCK_TOKENS, TOKENS)))
    """Tokens in a block of D's. A block of P's has 16."""
    hit_tokens: int = attrs.field(default=0, validator=attrs.validators.in_((0, BLOCK_TOKENS, TOKENS)))
    """How many of a prompt's tokens D's prefix cache has when the request is admitted; all: no KV is transferred."""
    groups: int = attrs.field(default=1, validator=between(1, 2))
    """KV cache groups, which have their blocks from one pool. The second has a sliding window: P and D keep the KV of
    the last tokens of a prompt there, and have no block for the others."""
    late: bool = False
    """Engines report some time later what they have done: D's that a request has blocks, P's that it has computed a
    prompt, both that something is copied."""
    decodes: bool = False
    """Decoding takes time, during which D's engine may take a request's blocks and compute it anew. Otherwise it has
    ended as soon as its KV is there."""
    lagging: bool = False
    """Messages between endpoints of one engine take time; each pair of endpoints receives them in order."""
    concurrent: bool = True
    """The decode leg may arrive before the prefill has finished."""
    chunks: int = attrs.field(default=1, validator=between(1, 7))
    """A one-sided operation reads its source and lands in so many pieces; 1: all at once, read and landed."""
    done_is_remote: bool = True
    """A good handle at P means that the bytes have landed; otherwise only that they have been read."""
    attempts: int = attrs.field(default=0, validator=between(0, 3))
    """How many attempts of a request the router's endpoint makes (routed.py); 0: the world has no router's endpoint,
    and whatever a router might do may happen at any moment."""
    streams: bool = False
    """With the router's endpoint: clients stream, so that D's first token reaches the router ahead of its leg's end."""
    horizon: int = attrs.field(default=0, validator=between(0, ENDLESS))
    """Engines have clocks (clocks.py), those of a kind the same one, and P's stops after so many ticks, or never
    (ENDLESS); 0: there are none, an armed timer may fire at any moment."""
    skew: int = attrs.field(default=1, validator=between(1, 1000))
    """By how many ticks one engine's clock may be ahead of the other's."""
    drop: int = budget("frames and notices that are lost")
    delay: int = budget("frames that later ones overtake")
    dup: int = budget("frames that arrive a second time, whenever they like")
    err: int = budget("operations that end badly, whose bytes may land all the same")
    unreachable: int = budget("handshakes that fail")
    refused: int = budget("handshakes of D that P's address refuses, though P lives")
    lose: int = budget("connections that break")
    abort: int = budget("requests that their client gives up", 1)
    prefill_abort: int = budget("prefills that end without KV")
    p_restart: int = budget("deaths of P, which starts again with the same engine id")
    d_restart: int = budget("deaths of D, which starts again with the same engine id")
    orphan: bool = False
    """The rank processes of P may outlive its first death: no peer hears from them, and they finish what they have
    begun."""
    down: bool = False
    """P may stay dead for a while: connections to it break, and its address refuses others. Where engines have clocks
    it does not start again at all."""
    sync: int = budget("SYNCs or heartbeats by the clock")
    cancel: int = budget("repetitions of a CANCEL")
    deadline: int = budget("requests whose deadline comes", 1)
    stall: int = budget("transfers that are given up for showing no progress", 1)
    preempt: int = budget("requests whose blocks D's engine takes while it decodes them")
    withdraw: int = budget("prompts that P's memory wants back for others")
    clocks: bool = True
    """Timers may fire. False: nothing takes as long as any timer, so that none fires and none may be needed
    (promptness.py)."""

    @property
    def budget(self) -> tuple[int, ...]:
        return tuple(getattr(self, fault.name.lower()) for fault in FaultKind)
