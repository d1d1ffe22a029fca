"""The roofline's L(T) of mixtures of experts against kernel tables: python benchmarks/expert_costs.py

Prints the error of L for each table that comes with pdflow of a model with experts: as `pdflow.cost.roofline` computes
it, and with the larger of reading and arithmetic, as of dense layers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from statistics import fmean
from unittest.mock import patch

from pdflow.cost import experts
from pdflow.cost.step import LinearTable, StepCost
from pdflow.scenario.costs.step_costs import step_cost
from pdflow.scenario.reading.load import parse, resolve
from pdflow.scenario.schema.scenario import ResolvedScenario

CASES = (
    ("qwen3-30b-a3b", "h100-sxm", 1),
    ("qwen3-30b-a3b", "h200", 1),
    ("qwen3-30b-a3b", "b200", 1),
    ("qwen3-30b-a3b", "rtx-pro-6000", 1),
    ("deepseek-v3", "h200", 8),
)
TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


def scenario(model: str, gpu: str, tp: int, cost: str) -> ResolvedScenario:
    return resolve(
        parse(
            "experts.toml",
            f"""
[workload]
requests = 1
arrival = {{ process = "constant", rate_rps = 1 }}
input_tokens = 10
output_tokens = 2
[model]
preset = "{model}"
[[pool]]
name = "pool"
role = "aggregated"
gpu = "{gpu}"
tp = {tp}
max_num_seqs = 64
kv_tokens = 100_000
cost = {{ model = "{cost}" }}
""",
        )
    )


def cost_of(model: str, gpu: str, tp: int, cost: str) -> StepCost:
    found = scenario(model, gpu, tp, cost)
    return step_cost(found.model, found.pools[0], found.base_dir)


def larger(model: object, moe: object, slope_ps: int, ps_per_param: float, _ep: int, _even: float) -> LinearTable:
    """The time of experts as of dense layers: the larger of reading and arithmetic."""
    times = []
    for tokens in experts.TABLE_TOKENS:
        touched = 1.0 - (1.0 - moe.experts_per_token / moe.num_experts) ** tokens
        times.append(round(max(model.routed_parameters * ps_per_param * touched, slope_ps * tokens)))
    return LinearTable(tokens=experts.TABLE_TOKENS, ps=tuple(times))


def errors() -> Iterator[list[float]]:
    """Yield the errors of each case, at TOKENS."""
    for model, gpu, tp in CASES:
        roofline, table = (cost_of(model, gpu, tp, cost).linear for cost in ("roofline", "aiconfigurator"))
        yield [roofline.of(tokens) / table.of(tokens) - 1 for tokens in TOKENS]


def show(title: str) -> None:
    found = list(errors())
    print(f"{title}: mean error {fmean(abs(error) for case in found for error in case):.1%}")
    for (model, gpu, tp), case in zip(CASES, found, strict=True):
        print(f"  {model}, {gpu}, tp {tp}: " + " ".join(f"{error:+.0%}" for error in case))


def main() -> int:
    print("at " + ", ".join(f"{tokens:,}" for tokens in TOKENS) + " tokens")
    show("as computed")
    with patch.object(experts, "_experts", larger):
        show("experts as dense layers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
