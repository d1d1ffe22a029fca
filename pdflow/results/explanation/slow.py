"""What the slowest first tokens of a run are made of, and the requests that show it.

The slowest 1 % are the requests whose TTFT is at least the 99th percentile; at least one. Requests that arrived during
the warm-up, and those that were not completed, count nowhere.
"""

from __future__ import annotations

from typing import Any, Final

import attrs
import numpy as np

from pdflow.errors import EXIT_BAD_INPUT, PdflowError
from pdflow.results.explanation.inter_token import WorstItl, milliseconds
from pdflow.results.explanation.recorded import RecordedRun
from pdflow.results.formatting import percent
from pdflow.results.records import STAGES, IntColumn, stage_durations_ns

SLOWEST_SHARE: Final = 100
"""One of how many requests counts as slow."""


class NoFirstTokenError(PdflowError):
    """No request of the run was completed, so there is no TTFT to explain."""

    exit_code = EXIT_BAD_INPUT


@attrs.frozen
class Example:
    """A request that shows something, and what. `itl`: that of its ITLs."""

    request: int
    why: str
    itl: bool = False


@attrs.frozen(kw_only=True)
class SlowRequests:
    """The mean stages of the slowest requests and of all, in ns, and the requests that show them best.

    `itl` is the worst ITL of the run; None if that is not known, for the reason in `no_itl`.
    """

    slow: int
    completed: int
    least_ttft_ns: int
    slow_ns: tuple[float, ...]
    all_ns: tuple[float, ...]
    examples: tuple[Example, ...]
    itl: WorstItl | None = None
    no_itl: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return it for --json, times in ns."""
        return {
            "completed": self.completed,
            "slow": {
                "requests": self.slow,
                "least_ttft_ns": self.least_ttft_ns,
                "mean_ttft_ns": sum(self.slow_ns),
                "stages_mean_ns": dict(zip(STAGES, self.slow_ns, strict=True)),
            },
            "all": {"mean_ttft_ns": sum(self.all_ns), "stages_mean_ns": dict(zip(STAGES, self.all_ns, strict=True))},
            "worst_itl": None if self.itl is None else self.itl.as_dict(),
            **({"no_itl": self.no_itl} if self.no_itl else {}),
            "examples": [attrs.asdict(example) for example in self.examples],
        }


def counted(run: RecordedRun) -> IntColumn:
    """Return the requests that were completed and count: those that arrived after the warm-up."""
    records = run.records
    outcomes = zip(records.outcome, records.arrival_ns, strict=True)
    chosen = [
        request
        for request, (outcome, arrival) in enumerate(outcomes)
        if outcome == "completed" and arrival >= run.warmup_ns
    ]
    if not chosen:
        raise NoFirstTokenError(
            f"{run.folder}: no request was completed after the warm-up, so there is no TTFT to explain; "
            f"give the id of a request, from 0 to {len(records) - 1}, to see where it stopped"
        )
    return np.array(chosen, dtype=np.int64)


def slow_requests(run: RecordedRun, itl: WorstItl | None, no_itl: str = "") -> SlowRequests:
    """Return what the slowest requests are made of. Raises NoFirstTokenError."""
    who = counted(run)
    durations = stage_durations_ns(run.records)[:, who]
    ttft = durations.sum(axis=0)
    order = np.lexsort((who, -ttft))
    slow = order[: max(1, -(-len(who) // SLOWEST_SHARE))]
    slow_ns = durations[:, slow].mean(axis=1)
    return SlowRequests(
        slow=len(slow),
        completed=len(who),
        least_ttft_ns=int(ttft[slow[-1]]),
        slow_ns=tuple(slow_ns.tolist()),
        all_ns=tuple(durations.mean(axis=1).tolist()),
        examples=_examples(who, durations, slow, itl),
        itl=itl,
        no_itl=no_itl,
    )


def _examples(who: IntColumn, durations: IntColumn, slow: IntColumn, itl: WorstItl | None) -> tuple[Example, ...]:
    """Return the slowest request, the one that is most like the mean of the slow ones, and the one with the worst ITL,
    or, if that is not known, the slow one that is least like the mean."""
    first = int(slow[0])
    found = [Example(int(who[first]), f"the slowest first token: {_made_of(durations[:, first])}")]
    rest = slow[1:]
    if len(rest):
        away = np.abs(durations[:, rest] - durations[:, slow].mean(axis=1)[:, None]).sum(axis=0)
        typical = int(rest[away.argmin()])
        found.append(
            Example(int(who[typical]), f"most like the mean of the slowest: {_made_of(durations[:, typical])}")
        )
        if itl is None and len(rest) > 1:
            unlike = int(rest[away.argmax()])
            found.append(Example(int(who[unlike]), f"least like that mean: {_made_of(durations[:, unlike])}"))
    if itl is not None:
        found.append(Example(itl.request, f"the worst ITL, {milliseconds(itl.duration_ns)}: {itl.cause}", itl=True))
    return tuple(found)


def _made_of(stages: IntColumn) -> str:
    whole, most = int(stages.sum()), int(stages.argmax())
    share = percent(int(stages[most]) / whole) if whole else "0 %"
    return f"{milliseconds(whole)}, of which {share} {STAGES[most]}"
