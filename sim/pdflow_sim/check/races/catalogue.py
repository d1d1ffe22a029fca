"""All races, by number."""

from __future__ import annotations

from pdflow_sim.check.races.blocks import DESTINATION, SOURCE
from pdflow_sim.check.races.identity import IDENTITY, OUTCOMES, RESTART
from pdflow_sim.check.races.race import Race
from pdflow_sim.check.races.silence import INPUT, MISSING

GROUPS: dict[str, tuple[Race, ...]] = {
    "The life of P's blocks": SOURCE,
    "The life of D's blocks": DESTINATION,
    "Signals that are missing": MISSING,
    "What makes no sense": INPUT,
    "Who is meant": IDENTITY,
    "Who has started again": RESTART,
    "How often something ends": OUTCOMES,
}
RACES: dict[str, Race] = {race.number: race for group in GROUPS.values() for race in group}
