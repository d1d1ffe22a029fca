"""`pdflow serve` takes the scenario that a plan wrote as it is, with synthetic engines."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'pdflow[live]'")

import pdflow
from tests.runtime.support.live_pair import prompt
from tests.runtime.support.served import served

pytestmark = pytest.mark.slow

CONVERSATION = Path(__file__).resolve().parents[3] / "examples/conversation.toml"


@pytest.mark.trio
@pytest.mark.parametrize("kind", ["aggregated", "disaggregated"])
async def test_the_best_scenario_of_a_plan_is_served_unchanged(kind: str, tmp_path: Path) -> None:
    plan = pdflow.plan(
        CONVERSATION,
        slo="ttft=2s@p95,itl=50ms@p99",
        gpus=2,
        kind=kind,
        search=["xpyd"],
        requests=50,
        seeds=1,
        robust=False,
    )
    plan.save(tmp_path / "plan")
    with served(tmp_path, tmp_path / "plan" / "best" / "scenario.toml") as cluster:
        answer = await cluster.ask(prompt=prompt(40, 1), max_tokens=8, ignore_eos=True)
    assert answer.status == 200, answer.body
    assert len(answer.tokens) == 8
