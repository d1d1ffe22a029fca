"""Published measurements that nothing in pdflow was fitted on, as rows of rows.csv, and what the presets say of
them.

A row becomes the scenario that its source states, and nothing else: the preset of its model and GPU, its engines, its
load, its lengths as fixed numbers. What a source leaves out stays at pdflow's default.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Final

import attrs

from benchmarks.validation.common import latencies, read_csv, scenario_of
from benchmarks.validation.rows import NEARLY_FULL
from pdflow.scenario.costs.step_costs import step_cost
from pdflow.scenario.schema.scenario import Pool, ResolvedScenario
from pdflow.scenario.validation.fit import kv_tokens_of
from pdflow_sim.experiments.calibrate import ran
from pdflow_sim.world import World

FILE: Final = Path(__file__).with_name("rows.csv")
REQUESTS_PER_CLIENT: Final = 10
"""Where a source does not state how many requests it sent."""

FP8: Final = 'weight_dtype = "fp8"\nactivation_dtype = "fp8"'
MODELS: Final = {
    "llama-8b": 'preset = "llama-3.1-8b"',
    "llama-70b": 'preset = "llama-3.1-70b"',
    "llama-70b-fp8": f'preset = "llama-3.1-70b"\n{FP8}',
    "qwen3-8b": 'preset = "qwen3-8b"',
    "qwen3-8b-fp8": f'preset = "qwen3-8b"\n{FP8}',
    "qwen3-235b": 'preset = "qwen3-235b-a22b"',
    "qwen2.5-7b-int4": 'preset = "qwen2.5-7b-gptq-int4"',
    "deepseek-r1": 'preset = "deepseek-v3"',
    # The sizes in its config.json; MXFP4 has a scale of 8 bits for every 32 experts' weights of 4.
    "gpt-oss-120b": """name = "gpt-oss-120b"
num_layers = 36
hidden_size = 2880
intermediate_size = 2880
num_heads = 64
num_kv_heads = 8
head_dim = 64
vocab_size = 201088
expert_bytes_per_param = 0.53125
window = { tokens = 128, layers = 18 }
moe = { num_experts = 128, experts_per_token = 4, expert_intermediate_size = 2880 }""",
}
GPUS: Final = {"h20-3e": '{ preset = "h20", device_bytes = 143_000_000_000 }'}
"""Those that are not simply a preset."""
LINKS: Final = {
    # Eight NICs of 200 GB/s together; four of 400 Gb/s for eight GPUs.
    "mooncake-h800": 'preset = "rdma-400g"\nbandwidth_bytes_per_s = 25e9',
    "mooncake-h20": 'preset = "rdma-400g"\nbandwidth_bytes_per_s = 25e9',
    # 100 Gb/s, as the preset of the A10 supposes: the source states nothing.
    "sglang-a10": 'preset = "rdma-400g"\nbandwidth_bytes_per_s = 11.5e9',
    "dstack-ratios": 'preset = "nvlink"',
    "llm-d": 'preset = "rdma-400g"',
}
METHODS: Final = {
    "mooncake-h800": 'method = "mooncake-v1"',
    "llm-d": 'method = "nixl-pull"',
}
"""SGLang's prefill engines write into blocks that its decode engines have registered: push, the default."""
DISPATCH: Final = {"mooncake-h20": "concurrent", "sglang-a10": "concurrent", "dstack-ratios": "concurrent"}
POLICIES: Final = {"llm-d": "least-loaded"}
"""llm-d scores engines by their load; the others state round robin, or have one engine of each kind."""
ROLES: Final = {"A": "aggregated", "P": "prefill", "D": "decode"}


@attrs.frozen(kw_only=True)
class Change:
    """An experiment: a line of every pool, values of every `gpu`, and whether lengths vary as InferenceMAX draws
    them."""

    pool: str = ""
    gpu: str = ""
    lengths_vary: bool = False

    def length(self, tokens: int) -> str:
        return f'{{ dist = "uniform", low = {tokens * 4 // 5}, high = {tokens} }}' if self.lengths_vary else f"{tokens}"


AS_STATED: Final = Change()


@attrs.frozen(kw_only=True)
class Figures:
    """TTFT, TPOT and E2E in ms, output in tokens per second; None where a row does not state it."""

    ttft_ms: float | None
    tpot_ms: float | None
    e2e_ms: float | None
    output_tokens_per_s: float | None


@attrs.frozen(kw_only=True)
class Row:
    """One measurement."""

    source: str
    id: str
    engine: str
    model: str
    gpu: str
    pools: str
    """1A8: one aggregated engine of TP8; 2P2+1D4: two prefill engines of TP2 and one decode engine of TP4."""
    load: str
    requests: int
    input_tokens: int
    output_tokens: int
    kv_tokens: int | None
    block_size: int | None
    ttft_is: str
    tpot_is: str
    published: Figures

    @property
    def clients(self) -> int:
        """Requests in the system, or 0 if requests arrive at a rate."""
        kind, number = self.load.split()
        return int(number) if kind in ("closed", "batch") else 0

    @property
    def name(self) -> str:
        lengths = f"{self.input_tokens}/{self.output_tokens}"
        return f"{self.engine}, {self.model}, {self.gpu}, {self.pools}, {lengths}, {self.load_name}"

    @property
    def load_name(self) -> str:
        if self.clients:
            return f"{self.clients} client{'s' * (self.clients > 1)}"
        number = self.load.split()[1]
        return f"{number} request{'s' * (number != '1')}/s"

    def engines(self) -> Iterator[tuple[str, int, int]]:
        """(role, replicas, tp)"""
        for engines in self.pools.split("+"):
            found = re.fullmatch(r"(\d+)([APD])(\d+)", engines)
            assert found is not None, self.pools
            yield ROLES[found[2]], int(found[1]), int(found[3])

    def text(self, change: Change) -> str:
        kind, number = self.load.split()
        arrival = f'"closed", concurrency = {number}' if self.clients else f'"{kind}", rate_rps = {number}'
        card = GPUS.get(self.gpu, f'{{ preset = "{self.gpu}" }}').replace(
            " }", f"{', ' if change.gpu else ''}{change.gpu} }}"
        )
        apart = "+" in self.pools
        # A batch is given to the engine itself, without a server.
        lines = [change.pool] + ["api_server_s = 0"] * (kind == "batch")
        lines += [f"kv_tokens = {self.kv_tokens}"] * (self.kv_tokens is not None)
        lines += [f"block_size = {self.block_size}"] * (self.block_size is not None and "block_size" not in change.pool)
        pools = "\n".join(
            f'[[pool]]\nname = "{role}"\nrole = "{role}"\nreplicas = {replicas}\ngpu = {card}\ntp = {tp}\n'
            + "\n".join(lines)
            for role, replicas, tp in self.engines()
        )
        return f"""
[workload]
requests = {self.requests}
arrival = {{ process = {arrival} }}
input_tokens = {change.length(self.input_tokens)}
output_tokens = {change.length(self.output_tokens)}
[model]
{MODELS[self.model]}
[transfer]
{METHODS.get(self.source, "") if apart else ""}
[router]
policy = "{POLICIES.get(self.source, "round-robin") if apart else "round-robin"}"
dispatch = "{DISPATCH.get(self.source, "sequential") if apart else "sequential"}"
[network]
{LINKS[self.source] if apart else 'preset = "ideal"'}
{pools}
"""


def rows() -> list[Row]:
    found = []
    for cells in read_csv(FILE):
        load = cells["load"]
        clients = int(load.split()[1]) if load.startswith("closed") else 0
        found.append(
            Row(
                source=cells["source"],
                id=cells["id"],
                engine=cells["engine"],
                model=cells["model"],
                gpu=cells["gpu"],
                pools=cells["pools"],
                load=load,
                requests=int(cells["requests"] or clients * REQUESTS_PER_CLIENT),
                input_tokens=int(cells["input_tokens"]),
                output_tokens=int(cells["output_tokens"]),
                kv_tokens=int(cells["kv_tokens"]) if cells["kv_tokens"] else None,
                block_size=int(cells["block_size"]) if cells["block_size"] else None,
                ttft_is=cells["ttft_is"],
                tpot_is=cells["tpot_is"],
                published=Figures(
                    **{
                        field.name: float(cells[field.name]) or None if cells[field.name] else None
                        for field in attrs.fields(Figures)
                    }
                ),
            )
        )
    return found


@attrs.frozen(kw_only=True)
class Answer:
    """What a row comes to with the presets."""

    figures: Figures
    past: bool
    """Whether prompts take nearly all of the time of the engines that compute them, or requests wait for a slot or for
    blocks: TTFT then depends on how long the run is."""


def simulated(row: Row, change: Change = AS_STATED) -> Answer:
    scenario = scenario_of(row.text(change))
    world = ran(scenario, {})
    found = latencies(world)
    ttfts, tpots = ([each[which] for each in found] for which in (0, 1))
    duration_s = world.totals.duration_ns / 1e9
    return Answer(
        figures=Figures(
            ttft_ms=statistic(ttfts, row.ttft_is or "mean"),
            tpot_ms=statistic(tpots, row.tpot_is or "mean"),
            e2e_ms=fmean(ttft + tpot * (row.output_tokens - 1) for ttft, tpot in found),
            output_tokens_per_s=row.requests * row.output_tokens / duration_s,
        ),
        past=any(_is_past(row, scenario, each, world) for each in scenario.pools),
    )


def errors(answers: Sequence[tuple[Row, Answer]], figure: str) -> list[float]:
    """Of the rows that state the figure."""
    return [
        getattr(answer.figures, figure) / getattr(row.published, figure) - 1
        for row, answer in answers
        if getattr(row.published, figure) is not None
    ]


def statistic(values: Sequence[float], which: str) -> float:
    """Of the name that rows.csv has for it."""
    if which == "mean":
        return fmean(values)
    return median(values) if which == "median" else quantiles(values, n=20, method="inclusive")[-1]


def _is_past(row: Row, scenario: ResolvedScenario, pool: Pool, world: World) -> bool:
    if pool.role != "prefill":
        clients = -(-row.clients // pool.replicas)
        tokens = row.input_tokens + row.output_tokens
        if clients > pool.max_num_seqs or clients * tokens > kv_tokens_of(scenario.model, pool):
            return True
    if pool.role == "decode":
        return False
    cost = step_cost(scenario.model, pool, scenario.base_dir)
    prompt_ps = cost.step_sums_ps(row.input_tokens, row.input_tokens * (row.input_tokens + 1) // 2, 0, 0) - cost.h0
    return prompt_ps * row.requests / pool.replicas / 1e3 / world.totals.duration_ns > NEARLY_FULL


def digits(value: float) -> str:
    """Four of them, or all before the point."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
