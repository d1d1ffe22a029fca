"""A scope: a small cluster, its number of requests, and its budgets of faults."""

from __future__ import annotations

from collections.abc import Collection
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
"""The largest value of any field, and a horizon without an end."""
COUNT = range(ENDLESS + 1)


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
    CORRUPT = 17
    ROUTER_RESTART = 18


BUDGETED_TIMERS = {
    TimerKind.SYNC: FaultKind.SYNC,
    TimerKind.CANCEL: FaultKind.CANCEL,
    TimerKind.DEADLINE: FaultKind.DEADLINE,
    TimerKind.STALL: FaultKind.STALL,
}
"""Kinds of timers whose firings a budget limits. Others may fire whenever they are armed: each firing ends something.
"""


def setting(default: Any, help_text: str, allowed: Collection[Any] | None = None) -> Any:
    """Return a field of Scope with its help text and the values that it allows; None: any of its type."""
    return attrs.field(default=default, metadata={"help": help_text, "allowed": allowed}, validator=_is_allowed)


def budget(help_text: str, default: int = 0) -> Any:
    """Return a field of Scope that limits the FaultKind of the same name."""
    return setting(default, f"budget: {help_text}", COUNT)


def _is_allowed(scope: Any, field: attrs.Attribute[Any], value: Any) -> None:
    allowed = field.metadata["allowed"]
    if allowed is not None and value not in allowed:
        raise ValueError(f"{field.name}: is {value}, expected {allowed_text(allowed)}")


def allowed_text(allowed: Collection[Any]) -> str:
    """Return the allowed values of a field for people, such as "0 to 2" or "8, 16 or 32"."""
    if isinstance(allowed, range):
        return f"{allowed[0]} to {allowed[-1]}"
    *others, last = (str(value) or '""' for value in allowed)
    return f"{', '.join(others)} or {last}"


@attrs.frozen(kw_only=True)
class Scope:
    """P engines and D engines, all of a kind alike, and budgets. Events without a budget may happen any number of
    times."""

    dialect: Dialect = attrs.field(default=STRICT, metadata={"help": "the dialect of the protocol", "allowed": None})
    method: str = setting(
        "",
        "a transfer method, with its engines, memories and pieces; empty: one operation moves all blocks of a prompt",
        ("", *METHODS),
    )
    progressive: bool = setting(
        False, "with a method that writes blocks: P writes blocks while it computes the next ones"
    )
    pulls: bool = setting(False, "D reads the blocks from P; otherwise P writes them to D")
    p_engines: int = setting(1, "P engines; prompts go to them in turn", range(1, 4))
    d_engines: int = setting(1, "D engines; requests go to them in turn", range(1, 4))
    p_tp: int = setting(1, "ranks of each P engine", range(1, 9))
    d_tp: int = setting(1, "ranks of each D engine", range(1, 9))
    requests: int = setting(1, "requests", range(1, 9))
    same_product: bool = setting(False, "all requests need the same prompt, as a retry and its first attempt do")
    same_base: bool = setting(False, "two prompts have the same X-Request-Id, as two dispatches with one base id do")
    pool: int = setting(
        0,
        "requests for which D has blocks at once; later ones reuse them. 0: each request has its own. With a method "
        "that uses staging memory at D: requests for which that memory has space",
        COUNT,
    )
    p_pool: int = setting(0, "prompts for which P's staging memory has space; 0: all", COUNT)
    pool_blocks: int = setting(
        ENDLESS, "blocks in D's pool, of which several P engines may each bind only a share", range(1, ENDLESS + 1)
    )
    d_block: int = setting(BLOCK_TOKENS, "tokens in a block of D; a block of P has 16", (8, BLOCK_TOKENS, TOKENS))
    hit_tokens: int = setting(
        0,
        "tokens of a prompt in D's prefix cache at admission; 32: the whole prompt, and nothing is transferred",
        (0, BLOCK_TOKENS, TOKENS),
    )
    window: int = setting(0, "registrations of D that P accepts above D's floor; 0: 65,536", COUNT)
    groups: int = setting(
        1,
        "KV cache groups that share a pool; the second has a sliding window and keeps the last tokens of a prompt",
        range(1, 3),
    )
    late: bool = setting(
        False, "engines report an admission, a computed prompt or a copy some time after it has happened"
    )
    decodes: bool = setting(
        False, "decoding takes time, and D's engine may preempt the request; otherwise it ends when the KV has arrived"
    )
    lagging: bool = setting(False, "messages between endpoints of one engine take time; each pair receives in order")
    concurrent: bool = setting(True, "the decode leg may arrive before the prefill has finished")
    chunks: int = setting(1, "pieces in which an operation reads its source and lands", range(1, 8))
    done_is_remote: bool = setting(True, "a completed WRITE at P has landed at D; otherwise P has only read its source")
    attempts: int = setting(
        0,
        "attempts of a request that the router's endpoint makes; 0: there is no router's endpoint, and anything that a "
        "router might do may happen at any moment",
        range(4),
    )
    streams: bool = setting(
        False, "with attempts: clients stream, so the router receives D's first token before its leg ends"
    )
    horizon: int = setting(
        0,
        f"engines have clocks, and P's stops after this many ticks ({ENDLESS}: never); 0: no clocks, armed timers may "
        "fire at any moment",
        COUNT,
    )
    skew: int = setting(1, "ticks by which one engine's clock may be ahead of the other's", range(1, ENDLESS + 1))
    drift: int = setting(
        0,
        "with horizon: D's clock advances by so many ticks more than P's each time; -1: P's by one more than D's",
        range(-1, 3),
    )
    idle: bool = setting(
        False, "with horizon: D's driver may stand still while no request is open, so that its SYNC is overdue"
    )
    drop: int = budget("frames and notices that are lost")
    delay: int = budget("frames that later frames overtake")
    dup: int = budget("frames that arrive a second time, at any later moment")
    err: int = budget("operations that fail; their bytes may land all the same")
    unreachable: int = budget("handshakes that fail")
    refused: int = budget("handshakes of D that P's address refuses although P is running")
    lose: int = budget("connections that break")
    corrupt: int = budget("frames whose bytes the receiver cannot decode, so that it closes the connection")
    abort: int = budget("requests that their client aborts", 1)
    prefill_abort: int = budget("prefills that end without KV")
    p_restart: int = budget("crashes of P, which restarts with the same engine id")
    d_restart: int = budget("crashes of D, which restarts with the same engine id")
    router_restart: int = budget("with attempts: crashes of the router, which restarts and knows nothing")
    orphan: bool = setting(
        False,
        "P's rank processes may survive P's first crash: no peer receives a frame from them, and they finish the "
        "operations that they have accepted",
    )
    down: bool = setting(
        False,
        "P may stay down after a crash: connections to it break, and its address refuses new ones. With clocks it "
        "never restarts",
    )
    rank_dies: bool = setting(
        False,
        "a crash may end the process of one P rank alone: connections to it break, and its address refuses new ones. "
        "The engine goes on without it, until it restarts with all of its ranks",
    )
    twin: bool = setting(
        False,
        "a second engine with P's id and another incarnation runs too; each handshake of D reaches either",
    )
    sync: int = budget("SYNCs or heartbeats that a timer sends")
    cancel: int = budget("repetitions of a CANCEL")
    deadline: int = budget("requests whose deadline passes", 1)
    stall: int = budget("transfers that end because they make no progress", 1)
    preempt: int = budget("requests that D's engine preempts while it decodes them")
    withdraw: int = budget("prompts that P's memory evicts")
    clocks: bool = setting(
        True, "timers may fire; otherwise nothing takes as long as a timer, no timer fires, and none may be needed"
    )

    @property
    def may_be_down(self) -> bool:
        """True if processes of P may be gone for a while."""
        return self.down or self.rank_dies

    @property
    def budget(self) -> tuple[int, ...]:
        return tuple(getattr(self, fault.name.lower()) for fault in FaultKind)
