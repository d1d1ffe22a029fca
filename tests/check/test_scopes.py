"""Every interleaving of the named scopes: no invariant breaks, from every state everything ends, every goal is reached.

The counts are asserted, so that a change of the space is noticed; they depend on no hash seed.
"""

from __future__ import annotations

import pytest

from pdflow_sim.check.scopes.catalogue import SCOPES
from pdflow_sim.check.scopes.named import Named
from tests.check.answers import explored

CI = [named for named in SCOPES if not named.nightly]
NIGHTLY = [named for named in SCOPES if named.nightly]


def look(named: Named) -> None:
    found = explored(named)
    assert named.goals <= found.goals
    if named.states:
        assert (found.states, found.transitions) == (named.states, named.transitions)


@pytest.mark.slow
@pytest.mark.parametrize("named", CI, ids=lambda named: named.name)
def test_nothing_breaks_in_any_interleaving(named: Named) -> None:
    look(named)


@pytest.mark.nightly
@pytest.mark.parametrize("named", NIGHTLY, ids=lambda named: named.name)
def test_nothing_breaks_in_larger_scopes(named: Named) -> None:
    look(named)
