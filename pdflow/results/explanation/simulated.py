"""One request as a simulation of its run, unchanged or with one change, has it again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from pdflow.results.explanation.inter_token import WorstItl
from pdflow.results.explanation.others import BlockSupply
from pdflow.results.records import STAGES, Records

COMPARED = (
    "outcome",
    "attempts",
    "prefill_engine",
    "decode_engine",
    "arrival_ns",
    "first_token_ns",
    "last_token_ns",
    "ends_ns",
)
"""The keys of a record that must be equal where the same run is simulated again."""


@attrs.frozen(kw_only=True)
class SimulatedRequest:
    """The request, and what was simulated for it: all that happened until it had ended.

    `record` is as in requests.jsonl; None if the request never came. `arrived` requests came until `until_ns`.
    """

    record: Mapping[str, Any] | None
    durations_ns: tuple[int, ...] = ()
    arrived: int
    until_ns: int
    itl: WorstItl | None = None
    memory: BlockSupply | None = None

    @property
    def ttft_ns(self) -> int | None:
        """The time to the first token; None if there was none."""
        if self.record is None or self.record["first_token_ns"] is None:
            return None
        return int(self.record["first_token_ns"] - self.record["arrival_ns"])

    @property
    def end(self) -> str:
        """How the request ended, for a person."""
        if self.record is None:
            return "it never arrived"
        reason = self.record["reason"]
        return f"{self.record['outcome'] or 'unfinished'}{f': {reason}' if reason else ''}"

    def as_dict(self) -> dict[str, Any]:
        """Return it for --json, times in ns."""
        stages = dict(zip(STAGES, self.durations_ns, strict=False)) if self.durations_ns else None
        return {
            "outcome": None if self.record is None else self.record["outcome"],
            "ttft_ns": self.ttft_ns,
            "stages_ns": stages,
            "worst_itl": None if self.itl is None else self.itl.as_dict(),
            "simulated_requests": self.arrived,
            "simulated_ns": self.until_ns,
        }


def differences(records: Records, request: int, again: SimulatedRequest) -> list[str]:
    """Return the keys in which the request differs from its record. What an interrupted run did not record is not
    compared."""
    recorded, found = records.record(request), again.record
    if found is None:
        return ["request"]
    unfinished = recorded["outcome"] is None
    different = []
    for key in COMPARED:
        before, now = recorded[key], found[key]
        if key == "ends_ns":
            known = {stage: end for stage, end in before.items() if end is not None or not unfinished}
            same = all(now[stage] == end for stage, end in known.items())
        else:
            same = before == now or (unfinished and (before is None or key in ("attempts", "last_token_ns")))
        if not same:
            different.append(key)
    return different


@attrs.frozen
class WhatIf:
    """The request with one change of the scenario. `change` says in words what it is."""

    name: str
    change: str
    simulated: SimulatedRequest

    def as_dict(self) -> dict[str, Any]:
        """Return it for --json."""
        return {"name": self.name, "change": self.change, **self.simulated.as_dict()}


@attrs.frozen
class LeftOut:
    """A what-if that was not simulated, and why."""

    name: str
    reason: str
