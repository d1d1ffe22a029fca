"""Right tokens from a pair: python -m benchmarks.vllm.identity --connector stock-push [--prompts N] [options]

The same prompts arrive in the same order and at the same concurrency at one vLLM alone (twice: what it differs from
itself is the measure) and at a pair. Greedy. Printed: prompts, failures, answers that differ with the gap of the two
likeliest tokens where they part, where D's prompt tokens came from, and the blocks still held afterwards. With
--digests (pdflow's connector alone) also whether all KV blocks at D are byte for byte those at P.

Exits with 1 if a request failed, or more answers differ than vLLM alone differs from itself, or
with --only-digests if a block does: for models that vLLM alone answers otherwise as soon as it decodes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import attrs
import trio

from benchmarks.vllm.arrivals import KINDS, Difference, Phase, compare, phases, send_phase
from benchmarks.vllm.client import Legs, Reply, prompt_tokens_by_source, total, two_legs
from benchmarks.vllm.connectors import DIGESTING, NAMES, PDFLOW, origin_of
from benchmarks.vllm.digesting import FOLDER
from benchmarks.vllm.digesting import compare as compare_blocks
from benchmarks.vllm.instances import Instance, Options, alone, default_work, pair
from benchmarks.vllm.model import BLOCK_SIZES, MODELS

RELEASE_S = 5.0
"""How long blocks may take to come back after the last answer."""


def options(arguments: argparse.Namespace, connector: str, tp: int, core: str) -> Options:
    """Return the options of an instance, from the command line."""
    extra = () if arguments.chunk is None else ("--max-num-batched-tokens", str(arguments.chunk))
    if arguments.argument:
        extra = (*extra, *arguments.argument)
    return Options(
        connector=connector,
        model=arguments.model,
        tp=tp,
        block_size=arguments.block_size,
        dtype=arguments.dtype,
        core="|".join(str(rank % 2) for rank in range(tp)) if tp > 1 else core,
        policy=arguments.policy,
        arguments=extra,
        extra_config=json.loads(arguments.extra_config),
        pdflow=DIGESTING if arguments.digests else PDFLOW,
        environment={FOLDER: str(arguments.work / "digests")},
    )


async def of_alone(arguments: argparse.Namespace, plan: list[Phase]) -> tuple[list[list[Reply]], int]:
    """Return what vLLM alone answers, by phase, and how many answers it gives otherwise the second time.

    Kept in the work folder: they depend on nothing but vLLM, the arrivals and the options.
    """
    what = [arguments.model, arguments.dtype, arguments.block_size, arguments.chunk, arguments.output]
    key = blake2b(json.dumps([what, [attrs.asdict(phase) for phase in plan]]).encode(), digest_size=8).hexdigest()
    file = arguments.work / f"alone-{key}.json"
    if file.is_file():
        kept = json.loads(file.read_text())
        return [[_reply(each) for each in phase] for phase in kept["replies"]], kept["differs"]
    async with alone(options(arguments, "none", 1, "1"), arguments.work) as instance:
        runs: list[list[list[Reply]]] = []
        for _ in range(2):
            await instance.client.reset_prefix_cache()
            send = partial(instance.client.complete, max_tokens=arguments.output)
            runs.append([await send_phase(phase, send) for phase in plan])
    differs = 0
    for phase, first, second in zip(plan, *runs, strict=True):
        different, failed = compare(phase, first, second)
        assert not failed, f"vLLM alone failed at {failed} of {phase.kind}"
        differs += len(different)
    kept = {"differs": differs, "replies": [[attrs.asdict(each) for each in phase] for phase in runs[0]]}
    file.write_text(json.dumps(kept))
    return runs[0], differs


def _reply(kept: dict[str, Any]) -> Reply:
    return Reply(**kept | {"tokens": tuple(kept["tokens"]), "gaps": tuple(kept["gaps"])})


async def of_pair(arguments: argparse.Namespace, plan: list[Phase]) -> tuple[list[list[Legs]], dict[str, Any]]:
    """Return what the pair answers, by phase, and what it says of itself afterwards."""
    p_options = options(arguments, arguments.connector, arguments.p_tp, "0")
    d_options = options(arguments, arguments.connector, arguments.d_tp, "1")
    async with pair(p_options, d_options, arguments.work) as (p, d):

        async def send(tokens: list[int]) -> Legs:
            return await two_legs(p.client, d.client, tokens, arguments.output, timeout_s=arguments.timeout)

        answers = []
        for phase in plan:
            if phase.forget is not None:
                await {"p": p, "d": d}[phase.forget].client.reset_prefix_cache()
            answers.append(await send_phase(phase, send))
        found = {"held": await held(p, d), "sources": prompt_tokens_by_source(await d.client.metrics())}
        return answers, found


async def held(*instances: Instance) -> dict[str, float]:
    """Return the share of each instance's blocks in use, once it is 0 or `RELEASE_S` have passed."""
    found: dict[str, float] = {}
    with trio.move_on_after(RELEASE_S):
        while not found or any(found.values()):
            for each in instances:
                found[each.name] = total(await each.client.metrics(), "vllm:kv_cache_usage_perc")
            await trio.sleep(0.2)
    return found


async def run(arguments: argparse.Namespace) -> int:
    if arguments.digests:
        shutil.rmtree(arguments.work / "digests", ignore_errors=True)
        (arguments.work / "digests").mkdir(parents=True)
    plan = phases(arguments.prompts, arguments.block_size, arguments.concurrency, arguments.seed, arguments.kinds)
    reference, noise = await of_alone(arguments, plan)
    answers, state = await of_pair(arguments, plan)
    differences: list[Difference] = []
    failures = 0
    kind = f"{arguments.model}, {arguments.dtype}, block {arguments.block_size}"
    print(f"{arguments.connector}, {kind}, TP {arguments.p_tp}-{arguments.d_tp}")
    for phase, expected, given in zip(plan, reference, answers, strict=True):
        different, failed = compare(phase, expected, given)
        print(
            f"  {phase.kind:13} x{phase.concurrency:<3} {len(given):4} sent, {failed} failed, {len(different)} differ"
        )
        for legs in given:
            if not legs.ok:
                print(f"    failed: P {legs.p}, D {legs.d}")
        differences += different
        failures += failed
    for each in differences:
        print(f"    {each}")
    print(f"  {sum(len(each) for each in answers)} prompts, {len(differences)} differ; vLLM alone from itself: {noise}")
    print(f"  D's prompt tokens by source: {state['sources']}")
    print(f"  share of blocks held afterwards: {state['held']}")
    blocks = compare_blocks(arguments.work / "digests") if arguments.digests else None
    if blocks is not None:
        print(f"  {blocks}", *blocks.differ[:5], sep="\n    ")
        state["blocks"] = attrs.asdict(blocks)
    if arguments.json is not None:
        kept = {"differences": [attrs.asdict(each) for each in differences], "noise": noise, "failures": failures}
        arguments.json.write_text(json.dumps(kept | state | {"prompts": arguments.prompts}, indent=2))
    wrong_blocks = blocks is not None and (blocks.differ or not blocks.blocks)
    wrong_tokens = len(differences) > noise and not arguments.only_digests
    return int(bool(failures or wrong_tokens or wrong_blocks))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connector", required=True, choices=[name for name in NAMES if name != "none"])
    parser.add_argument("--prompts", type=int, default=60)
    parser.add_argument("--output", type=int, default=16, help="tokens per answer")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--model", choices=MODELS, default="llama")
    parser.add_argument("--block-size", type=int, help="128 by default, 16 for deepseek")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--p-tp", type=int, default=1)
    parser.add_argument("--d-tp", type=int, default=1)
    parser.add_argument("--chunk", type=int, help="max_num_batched_tokens: longer prompts are computed in chunks")
    parser.add_argument("--policy", choices=["recompute", "fail"])
    parser.add_argument("--kinds", type=lambda text: tuple(text.split(",")), default=KINDS, help=", ".join(KINDS))
    parser.add_argument("--extra-config", default="{}", help="JSON over kv_connector_extra_config")
    parser.add_argument("--argument", action="append", help="a further argument of vLLM's server: --argument=--x=y")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds after which a leg counts as hung")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--digests", action="store_true", help="compare KV blocks of D with P's")
    parser.add_argument("--only-digests", action="store_true", help="judge by KV blocks, not by tokens")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--work", type=Path, default=default_work())
    arguments = parser.parse_args()
    arguments.digests |= arguments.only_digests
    if arguments.digests and origin_of(arguments.connector) != "pdflow":
        parser.error("--digests needs a connector of pdflow's")
    arguments.block_size = arguments.block_size or BLOCK_SIZES[arguments.model]
    return arguments


if __name__ == "__main__":
    sys.exit(trio.run(run, parse()))
