"""Every request's own inter-token latencies, read back from the step logs of the engines that decoded it.

Only --save-detailed asks for them, so nothing is recorded per token during a run. A request of n tokens has waited,
for all but its second token, exactly one step each of its decode engine, the last of which ended with its last token;
what is left of (last token - first token) is its second token's wait: one step too, or the whole transfer where the
first token came from the prefill engine. Holds for engines that give every running sequence a token per step and
never preempt; there, memory is that of the log's rows, not of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from pdflow.results.records import Records
from pdflow.results.steps import Steps

_PS_PER_NS = 1_000
_PS_PER_S = 10**12


def itls_s(records: Records, logs: Mapping[str, Steps]) -> Iterator[list[float]]:
    """Seconds, one list per request in the order of the workload: n-1 for a completed one, none for others.

    `logs` has the log of each decode engine under the name that the records use; its rows in order of time.
    """
    engines: dict[str, _Rows] = {}
    columns = (
        records.outcome,
        records.decode_engine,
        records.output_tokens,
        records.first_token_ns,
        records.last_token_ns,
    )
    for outcome, engine, tokens, first_ns, last_ns in zip(*columns, strict=True):
        if outcome != "completed" or engine is None or tokens < 2:
            yield []
            continue
        rows = engines.get(engine)
        if rows is None:
            rows = engines[engine] = _Rows(logs[engine])
        waits = rows.steps_until(last_ns * _PS_PER_NS, tokens - 2)
        second = max(0, (last_ns - first_ns) * _PS_PER_NS - sum(waits))
        yield [second / _PS_PER_S, *(wait / _PS_PER_S for wait in waits)]


class _Rows:
    """The rows of one engine's log in which some token was waited for."""

    __slots__ = ("_delta", "_first", "_start", "_steps")

    def __init__(self, log: Steps) -> None:
        folds = [
            np.stack([column.astype(np.int64)[kept] for column in (start, first, delta, steps)])
            for start, first, delta, steps, weight in log.folds()
            for kept in ((weight > 0) & (steps > 0),)
        ]
        self._start, self._first, self._delta, self._steps = np.concatenate(
            folds or [np.empty((4, 0), np.int64)], axis=1
        )

    def steps_until(self, instant_ps: int, number: int) -> list[int]:
        """The lengths in ps of the last `number` steps that ended by that instant, oldest first."""
        found: list[int] = []
        row = int(np.searchsorted(self._start, instant_ps, side="left")) - 1
        while row >= 0 and len(found) < number:
            lengths = self._first[row] + self._delta[row] * np.arange(self._steps[row], dtype=np.int64)
            if not found:
                ended = int(np.searchsorted(np.cumsum(lengths), instant_ps - self._start[row], side="right"))
                lengths = lengths[:ended]
            found.extend(lengths[::-1].tolist())
            row -= 1
        return found[:number][::-1]
