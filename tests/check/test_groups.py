"""Two KV cache groups in the explored world: block tables arrive as they were made, or an invariant breaks."""

from __future__ import annotations

from typing import Any

import attrs
import msgspec
import pytest

from pdflow.protocol.consumer.reads import ConsumerReads
from pdflow.protocol.dialect import VLLM_COMPAT
from pdflow.protocol.effects import Effects, PostRead
from pdflow.protocol.values import NO_BLOCK, Allocation
from pdflow_sim.check.moves.compose import relation
from pdflow_sim.check.scopes.group_scopes import GROUPS
from pdflow_sim.check.scopes.named import Named
from pdflow_sim.check.scopes.scope import Scope
from pdflow_sim.check.search.search import explore
from pdflow_sim.check.state.shadow_state import Broken
from pdflow_sim.check.state.symmetry import Symmetry

ALONE = {"abort": 0, "deadline": 0, "stall": 0}


def test_the_second_group_keeps_the_last_tokens() -> None:
    cluster = relation(Scope(groups=2, d_block=8)).space.cluster
    assert cluster.sources == [Allocation(10, (100, 101, 150), ((100, 101), (NO_BLOCK, 150)))]
    kept = [(200, 201, 202, 203), (NO_BLOCK, NO_BLOCK, NO_BLOCK, 500)]
    assert [allocation.groups for allocation in cluster.targets] == [tuple(kept)]
    assert cluster.request_blocks == 5


@pytest.mark.parametrize("named", [each for each in GROUPS if each.scope.p_engines == 1], ids=lambda each: each.name)
def test_which_block_holds_which_tokens_decides_nothing(named: Named) -> None:
    covered = explore(relation(attrs.evolve(named.scope, groups=1)), limit=1 << 62)
    assert (covered.states, covered.transitions) == (named.states, named.transitions)


def test_requests_with_two_groups_are_alike() -> None:
    states = []
    for groups in (1, 2):
        world = relation(Scope(groups=groups, requests=2, **ALONE))
        symmetry = Symmetry(world.space)
        assert symmetry.others
        states.append(explore(world, limit=1 << 62, symmetry=symmetry).states)
    assert states[0] == states[1]


def test_a_read_that_loses_the_tables_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    post = ConsumerReads.post

    def of_one_group(self: ConsumerReads, read: Any) -> Effects:
        (effect,) = post(self, read)
        assert type(effect) is PostRead
        return (msgspec.structs.replace(effect, groups=()),)

    monkeypatch.setattr(ConsumerReads, "post", of_one_group)
    with pytest.raises(Broken, match=r"S4: D\.r0 moves KV with block tables"):
        explore(relation(Scope(groups=2, pulls=True)), limit=1 << 62)


def test_a_source_with_a_hole_where_d_has_none_is_found() -> None:
    world = relation(Scope(groups=2))
    (target,) = world.space.cluster.targets
    world.space.cluster.targets = [Allocation(target.generation, (200, 201, 500, 501), ((200, 201), (500, 501)))]
    with pytest.raises(Broken, match="prefill has no block of them"):
        explore(world, limit=1 << 62)


@pytest.mark.parametrize("wrong", [{"method": "cpu-staged"}, {"dialect": VLLM_COMPAT}])
def test_groups_need_a_world_that_can_have_them(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="groups=2 "):
        relation(Scope(groups=2, **wrong))
