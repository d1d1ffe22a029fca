"""Do the waves of a closed loop with fixed lengths spread? python -m benchmarks.vllm.closed_loop [options]

One vLLM, and clients that all start at once and send their next request as soon as they have an answer; every prompt
and every answer has the same length. Printed for each round (the k-th request of every client): the median TTFT as a
multiple of that of a request that is alone, and how many requests shared the step of their first token, which are those
whose first tokens came within a millisecond of each other. Next to it the same of a simulation with noise, whose cost
model has two durations of this instance: those of a prompt and of a decode step of a request that is alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

import trio

from benchmarks.vllm.instances import HOST, Instance, Options, alone, default_work
from pdflow.cost.step import PS_PER_S, LinearTime, StepCost
from pdflow.scenario.reading.load import parse, resolve
from pdflow_sim.experiments.calibrate import ran

ALONE: Final = 8
"""Requests that are sent one by one, for comparison."""
TOGETHER_S: Final = 1e-3


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--input", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=96, help="tokens of each answer")
    parser.add_argument("--step-tokens", type=int, default=2048, help="vLLM's --max-num-batched-tokens")
    parser.add_argument("--work", type=Path, default=default_work())
    trio.run(_measure, parser.parse_args(arguments))
    return 0


async def _measure(asked: argparse.Namespace) -> None:
    limits = ("--max-num-seqs", str(asked.clients), "--max-num-batched-tokens", str(asked.step_tokens))
    options = Options(arguments=(*limits, "--no-enable-prefix-caching"))
    async with alone(options, asked.work) as instance:
        await _bench(instance, asked, ALONE, 1)
        one = await _bench(instance, asked, ALONE, 1)
        loop = await _bench(instance, asked, asked.clients * asked.rounds, asked.clients)
    prompt_s, step_s = median(one["ttfts"]), median(map(median, one["itls"]))
    print(f"alone: TTFT {prompt_s * 1e3:.1f} ms, {step_s * 1e3:.2f} ms per decode step; {asked.clients} clients")
    print("round     vLLM: TTFT  in shared steps  simulated: TTFT  in shared steps")
    real = _rounds(loop["start_times"], loop["ttfts"], asked.clients)
    simulated = _rounds(*_simulated(asked, prompt_s, step_s), asked.clients)
    for number, ((ttft, shared), (ttft_too, shared_too)) in enumerate(zip(real, simulated, strict=True), 1):
        print(f"{number:5} {ttft / prompt_s:14.1f} {shared:16} {ttft_too / prompt_s:16.1f} {shared_too:16}")


def _rounds(starts: list[float], ttfts: list[float], clients: int) -> Iterator[tuple[float, int]]:
    """Yield of each round its median TTFT, and how many of its requests shared a step with another of them."""
    order = sorted(range(len(starts)), key=starts.__getitem__)
    for at in range(0, len(order), clients):
        those = order[at : at + clients]
        firsts = sorted(starts[index] + ttfts[index] for index in those)
        near = [later - earlier < TOGETHER_S for earlier, later in pairwise(firsts)]
        shared = sum(before or behind for before, behind in zip([False, *near], [*near, False], strict=True))
        yield median([ttfts[index] for index in those]), shared


def _simulated(asked: argparse.Namespace, prompt_s: float, step_s: float) -> tuple[list[float], list[float]]:
    """Return the starts and TTFTs of the same loop, simulated. vLLM schedules synchronously on CPUs."""
    scenario = resolve(
        parse(
            "closed-loop.toml",
            f"""
[workload]
requests = {asked.clients * asked.rounds}
arrival = {{ process = "closed", concurrency = {asked.clients} }}
input_tokens = {asked.input}
output_tokens = {asked.output}
[model]
preset = "tiny"
[[pool]]
name = "vllm"
role = "aggregated"
gpu = "cpu"
api_server_s = 0.001
max_num_seqs = {asked.clients}
max_num_batched_tokens = {asked.step_tokens}
kv_tokens = {2 * asked.clients * (asked.input + asked.output)}
async_scheduling = false
[network]
preset = "ideal"
""",
        )
    )
    per_token_ps = round((prompt_s - step_s) / asked.input * PS_PER_S)
    cost = StepCost(h0=round(step_s * PS_PER_S), linear=LinearTime(slope_ps=per_token_ps))
    records = ran(scenario, {"vllm": cost}).records
    starts = [at / 1e9 for at in records.arrival_ns]
    return starts, [first / 1e9 - start for start, first in zip(starts, records.first_token_ns, strict=True)]


async def _bench(instance: Instance, asked: argparse.Namespace, requests: int, clients: int) -> dict[str, Any]:
    """Run `pdflow bench` in a process of its own, and return its detailed result."""
    file = asked.work / "closed-loop.json"
    command = [sys.executable, "-m", "pdflow", "bench", "--host", HOST, "--port", str(instance.port)]
    command += ["--num-prompts", str(requests), "--max-concurrency", str(clients), "--request-rate", "inf"]
    command += ["--random-input-len", str(asked.input), "--random-output-len", str(asked.output)]
    command += ["--ignore-eos", "--save-result", "--save-detailed", "--result-filename", str(file)]
    await trio.run_process(command, capture_stdout=True, env=instance.environment())
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


if __name__ == "__main__":
    sys.exit(main())
