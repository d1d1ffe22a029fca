"""What share of a GPU's FLOP/s do products of weights reach? python -m benchmarks.product_shares

By NVIDIA's kernel tables of dense models that come with pdflow (aiconfigurator-core 0.12.0), in 16 and in 8 bits: the
arithmetic of all linear layers, over the time of L(T) less the roofline's all-reduces. The presets' `ec` and `ec_fp8`
are near the medians at 2,048 tokens on one GPU.
"""

from __future__ import annotations

import sys
from statistics import median
from typing import Final, NamedTuple

from benchmarks.validation.common import scenario_of
from pdflow.cost.allreduce import with_allreduce
from pdflow.cost.roofline import product_flops
from pdflow.cost.step import PS_PER_S, LinearTime
from pdflow.scenario.costs.cost_file import CostFile
from pdflow.scenario.costs.step_costs import cost_tables

TOKENS: Final = (512, 2048, 8192)
EIGHT_BITS: Final = 'weight_dtype = "fp8"\nactivation_dtype = "fp8"\n'


class Shares(NamedTuple):
    """The shares of one table, by number of tokens."""

    dtype: str
    gpu: str
    tp: int
    table: str
    shares: tuple[float, ...]


def shares_of(name: str, file: CostFile) -> Shares | None:
    """Return the shares of a table; None for a mixture of experts."""
    engine = file.engine
    eight = engine.weight_bytes_per_param == 1
    scenario = scenario_of(f"""
[workload]
requests = 1
arrival = {{ process = "constant", rate_rps = 1 }}
input_tokens = 1
output_tokens = 1
[model]
preset = "{engine.model}"
{EIGHT_BITS if eight else ""}
[[pool]]
name = "engine"
role = "aggregated"
gpu = "{engine.gpu}"
tp = {engine.tp}
""")
    model, pool = scenario.model, scenario.pools[0]
    if model.moe is not None:
        return None
    linear, allreduces = file.step_cost().linear, with_allreduce(LinearTime(), model, pool.gpu, pool.tp, 2)
    flops = pool.tp * product_flops(pool.gpu, model.activation_dtype)
    shares = tuple(
        2 * model.linear_parameters * tokens * PS_PER_S / flops / (linear.of(tokens) - allreduces.of(tokens))
        for tokens in TOKENS
    )
    return Shares("fp8" if eight else "bf16", pool.gpu.name, pool.tp, name, shares)


def main() -> int:
    found = [each for each in map(shares_of, *zip(*cost_tables("aiconfigurator").items(), strict=True)) if each]
    print(f"{'':42}" + "".join(f"{tokens:>8}" for tokens in TOKENS) + " tokens")
    for each in sorted(found):
        print(f"{each.table:42}" + "".join(f"{share:8.2f}" for share in each.shares))
    print("median at 2048 tokens on one GPU:")
    for dtype, gpu in sorted({(each.dtype, each.gpu) for each in found if each.tp == 1}):
        those = [each.shares[1] for each in found if (each.dtype, each.gpu, each.tp) == (dtype, gpu, 1)]
        print(f"  {dtype} {gpu}: {median(those):.2f} of {len(those)}, {min(those):.2f} to {max(those):.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
