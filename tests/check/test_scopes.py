"""Every interleaving of the named scopes: no invariant breaks, from every state everything ends, every goal is reached.

The counts are asserted, so that a change of the space is noticed; they depend on no hash seed.
"""

from __future__ import annotations

import pytest

from sim.check.named import Named
from sim.check.scopes import SCOPES
from sim.check.search import explore
from sim.check.symmetry import Symmetry
from sim.check.timed import relation

CI = [named for named in SCOPES if not named.nightly]
NIGHTLY = [named for named in SCOPES if named.nightly]


def look(named: Named) -> None:
    """Every state; where there are too many to count, one of those that are alike."""
    world = relation(named.scope)
    covered = explore(world, limit=1 << 62, symmetry=None if named.states else Symmetry(world))
    assert covered.complete
    assert named.goals <= world.judge.seen.keys()
    if named.states:
        assert (covered.states, covered.transitions) == (named.states, named.transitions)


@pytest.mark.slow
@pytest.mark.parametrize("named", CI, ids=lambda named: named.name)
def test_nothing_breaks_in_any_interleaving(named: Named) -> None:
    look(named)


@pytest.mark.nightly
@pytest.mark.parametrize("named", NIGHTLY, ids=lambda named: named.name)
def test_nothing_breaks_in_larger_scopes(named: Named) -> None:
    look(named)
