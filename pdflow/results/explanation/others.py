"""What each stage of one request waited for, from the records of the other requests of the run.

Records have the ends of stages, so it is known which requests were in which stage of which engine at each instant. It
is not known from them what an engine had in one step, or how many KV blocks were free: a simulation of the same run
adds these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from pdflow.results.formatting import count
from pdflow.results.records import (
    D_ADMIT,
    FIRST_DECODE,
    HANDOFF,
    HANDSHAKE,
    NOTIFY,
    P_QUEUE,
    PREFILL,
    ROUTE,
    XFER_POST,
    XFER_WIRE,
    IntColumn,
    Records,
)

Chosen: TypeAlias = npt.NDArray[np.bool_]

NAMED: Final = 4
"""Requests that a text names; of the others it has the number."""
_LATEST: Final = np.iinfo(np.int64).max


@attrs.frozen
class StageWait:
    """What one stage waited for: in words, and the other requests that it names, with the tokens of their prompts."""

    text: str
    requests: tuple[int, ...] = ()
    prompt_tokens: int = 0


@attrs.frozen
class BlockSupply:
    """The KV blocks of a request's D when the request began to wait for its admission.

    `to_come`: blocks of other requests whose KV was still to come from the same P; D holds a request back if that
    would be more than `most_to_come` (None: no limit).
    """

    free: int
    total: int
    needed: int
    to_come: int = 0
    most_to_come: int | None = None

    @property
    def holds_back(self) -> bool:
        """Whether D held the request back although it had blocks."""
        limit = self.most_to_come
        return limit is not None and self.to_come > 0 and self.to_come + self.needed > limit


class OtherRequests:
    """The other requests of a run, as those of one request's stages. `pulls`: D posts transfers; None if unknown."""

    def __init__(self, records: Records, request: int, links: tuple[str, ...] = (), pulls: bool | None = None) -> None:
        self.records = records
        self.request = request
        self.pulls = pulls
        self.links = links
        self.ends = [np.array(column, dtype=np.int64) for column in records.ends]
        self.tokens = np.array(records.input_tokens, dtype=np.int64)
        last = np.array(records.last_token_ns, dtype=np.int64)
        still_open = np.array([outcome is None for outcome in records.outcome], dtype=bool)
        # Of a request that failed it is not known when it released what it held.
        self.left = np.where(still_open, _LATEST, last)
        self.never = np.where(still_open, _LATEST, -1)
        self.p, self.d = records.prefill_engine[request], records.decode_engine[request]
        self.alone = self.p is not None and self.d in (None, self.p)
        others = np.arange(len(records)) != request
        self.same_p = others & _equal(records.prefill_engine, self.p)
        self.same_d = others & _equal(records.decode_engine, self.d)
        self.others = others

    def wait(self, stage: int, begin: int, end: int, memory: BlockSupply | None = None) -> StageWait | None:
        """Return what a stage that lasted from `begin` to `end` waited for; None if it took no time."""
        if end <= begin:
            return None
        if stage == D_ADMIT:
            return self._d_admit(begin, end, memory)
        return _RULES[stage](self, begin, end)

    def _end(self, stage: int) -> IntColumn:
        """Return the ends of a stage; that of a request which has not reached it, and is still open, is yet to come."""
        column = self.ends[stage]
        return np.where(column < 0, self.never, column)

    def _during(self, start: IntColumn, end: IntColumn, begin_ns: int, end_ns: int) -> Chosen:
        """Return which intervals overlap the stage."""
        return (start >= 0) & (start < end_ns) & (end > begin_ns)

    def _wait(self, chosen: Chosen, text: str) -> StageWait:
        who = np.flatnonzero(chosen)
        return StageWait(text, tuple(who.tolist()), int(self.tokens[who].sum()))

    def _named(self, chosen: Chosen, what: str) -> str:
        """Return "3 requests ahead (r4, r5, r6)": `what` has a form for one, and for several behind a slash."""
        who = np.flatnonzero(chosen).tolist()
        one, _, several = what.partition("/")
        names = ", ".join(f"r{each}" for each in who[:NAMED]) + (", ..." if len(who) > NAMED else "")
        if not who:
            return f"no {several}"
        return f"{count(len(who))} {one if len(who) == 1 else several} ({names})"

    def _route(self, begin: int, end: int) -> StageWait:
        attempts = self.records.attempts[self.request]
        retried = f"; attempt {attempts}: the time of earlier attempts counts here" if attempts > 1 else ""
        return StageWait(f"the router, one hop of HTTP, and the API server of {self.p or 'P'}{retried}")

    def _p_queue(self, begin: int, end: int) -> StageWait:
        entered, mine = self.ends[ROUTE], self.ends[ROUTE][self.request]
        index = np.arange(len(entered))
        before = (entered >= 0) & ((entered < mine) | ((entered == mine) & (index < self.request)))
        ahead = self.same_p & before & (self._end(PREFILL) > begin)
        text = self._named(ahead, f"request ahead in {self.p}/requests ahead in {self.p}")
        text += f", {count(int(self.tokens[ahead].sum()))} prompt tokens" if ahead.any() else ""
        decoding = self.same_p & self.same_d & (self.ends[PREFILL] >= 0) & (self.ends[PREFILL] <= begin)
        if self.alone and (decoding := decoding & (self.left > begin)).any():
            text += f"; {count(int(decoding.sum()))} requests decode in its steps"
        return self._wait(ahead, text + ("" if ahead.any() else ": its next step had not begun yet"))

    def _prefill(self, begin: int, end: int) -> StageWait:
        together = self.same_p & self._during(self.ends[P_QUEUE], self._end(PREFILL), begin, end)
        text = f"{count(self.records.input_tokens[self.request])} tokens of its own"
        if together.any():
            text += f"; {self._named(together, 'other prompt/other prompts')} in {self.p} at that time"
            text += f", {count(int(self.tokens[together].sum()))} tokens"
        return self._wait(together, text)

    def _handoff(self, begin: int, end: int) -> StageWait:
        return StageWait(f"P's answer if D's leg follows it, one hop of HTTP, and the API server of {self.d or 'D'}")

    def _d_admit(self, begin: int, end: int, memory: BlockSupply | None) -> StageWait:
        entered, admitted = self.ends[HANDOFF], self._end(D_ADMIT)
        ahead = self.same_d & (entered >= 0) & (entered <= self.ends[HANDOFF][self.request]) & (admitted > begin)
        ahead &= admitted <= end
        holding = self.same_d & (self.ends[D_ADMIT] >= 0) & (self.ends[D_ADMIT] <= begin) & (self.left > begin)
        text = self._named(ahead, f"request ahead in {self.d}/requests ahead in {self.d}")
        if holding.any():
            text += f"; {count(int(holding.sum()))} requests there held {count(int(self.tokens[holding].sum()))} "
            text += "prompt tokens of KV"
        if memory is not None:
            text += f"; {count(memory.free)} of {count(memory.total)} blocks were free, it needs {count(memory.needed)}"
            if memory.holds_back and memory.most_to_come is not None:
                text += f"; {self.d} held it back: {count(memory.to_come)} blocks were still to come from {self.p}, "
                text += f"and at most {count(memory.most_to_come)} may (transfer.quarantine_fraction)"
        return self._wait(ahead | holding, text)

    def _handshake(self, begin: int, end: int) -> StageWait:
        return StageWait(f"control messages between {self.p} and {self.d}: handshake, registration or READ order")

    def _xfer_post(self, begin: int, end: int) -> StageWait:
        poster = {True: self.d, False: self.p, None: f"{self.p} or {self.d}"}[self.pulls]
        same = {True: self.same_d, False: self.same_p, None: self.same_p | self.same_d}[self.pulls]
        ordered = np.maximum(np.maximum(self.ends[PREFILL], self.ends[D_ADMIT]), self.ends[HANDSHAKE])
        posted = same & self._during(ordered, self._end(XFER_POST), begin, end)
        text = f"descriptors that {poster} posts; "
        return self._wait(posted, text + self._named(posted, "other transfer was posted/other transfers were posted"))

    def _xfer_wire(self, begin: int, end: int) -> StageWait:
        under_way = self._during(self.ends[XFER_POST], self._end(XFER_WIRE), begin, end)
        left, reached = self.same_p & under_way, self.same_d & under_way
        shared = [name for name in self.links if " " not in name]
        text = self._named(left, f"other transfer left {self.p}/other transfers left {self.p}")
        text += f"; {self._named(reached, f'other transfer reached {self.d}/other transfers reached {self.d}')}"
        others = left | reached
        if shared:
            elsewhere = self.others & under_way & ~others
            text += (
                f"; {self._named(elsewhere, 'transfer elsewhere/transfers elsewhere')} may share {', '.join(shared)}"
            )
            others |= elsewhere
        return self._wait(others, text)

    def _notify(self, begin: int, end: int) -> StageWait:
        return StageWait(f"the message that all KV has landed, and the next poll of {self.d}")

    def _first_decode(self, begin: int, end: int) -> StageWait:
        if self.alone:
            return StageWait("one hop of HTTP to the client")
        decoding = self.same_d & self._during(self.ends[NOTIFY], self.left, begin, end)
        text = f"the next step of {self.d}, with {self._named(decoding, 'other request/other requests')}, and HTTP"
        return self._wait(decoding, text)


_RULES: Final[Mapping[int, Callable[[OtherRequests, int, int], StageWait]]] = {
    ROUTE: OtherRequests._route,
    P_QUEUE: OtherRequests._p_queue,
    PREFILL: OtherRequests._prefill,
    HANDOFF: OtherRequests._handoff,
    HANDSHAKE: OtherRequests._handshake,
    XFER_POST: OtherRequests._xfer_post,
    XFER_WIRE: OtherRequests._xfer_wire,
    NOTIFY: OtherRequests._notify,
    FIRST_DECODE: OtherRequests._first_decode,
}


def _equal(names: list[str | None], name: str | None) -> Chosen:
    return np.array([name is not None and each == name for each in names], dtype=bool)
