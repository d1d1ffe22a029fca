"""All races, by number."""

from __future__ import annotations

from pdflow_sim.check.races.blocks import DESTINATION, SOURCE
from pdflow_sim.check.races.identity import IDENTITY, OUTCOMES, RESTART
from pdflow_sim.check.races.race import Race
from pdflow_sim.check.races.silence import INPUT, MISSING

GROUPS: dict[str, tuple[Race, ...]] = {
    "P's blocks": SOURCE,
    "D's blocks": DESTINATION,
    "Missing signals": MISSING,
    "Malformed input": INPUT,
    "Identity": IDENTITY,
    "Restarts": RESTART,
    "Outcomes": OUTCOMES,
}
RACES: dict[str, Race] = {race.number: race for group in GROUPS.values() for race in group}
