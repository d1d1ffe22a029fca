"""The same tokens by every way: python -m benchmarks.gpu identity [--requests N] [--only WORDS] [--jobs N]

A cluster of one prefill and one decode engine on the same GPU, in processes of their own, answers prompts at a
concurrency of 16, for each method and each way that KV can go. Its tokens are compared with those of one engine, asked
the same at the same concurrency, and with transformers: each token must be the likeliest after those before it.

In bfloat16 one engine's tokens depend on the other sequences in a step. So in bfloat16 compare the number of answers
that differ with the number that differ between two runs of one engine, which is printed too.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Any

import trio

from benchmarks.gpu.served_cases import ServedCase, alone, cases
from tests.runtime.support.served import Served, served

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples/tiny-docs"
CONCURRENCY = 16
OUTPUT = 16
LONGEST = 1500
ANSWER_S = 120.0


def prompt(number: int) -> list[int]:
    """Lengths from 1 to 1,500 tokens, most of them short."""
    length = 1 + int((number * 0.6180339887 % 1) ** 3 * LONGEST) if number else LONGEST
    return [(number * 7919 + at * 31 + (at * at) % 97) % 1000 + 5 for at in range(length)]


async def answers(cluster: Served, count: int) -> list[list[int] | str]:
    """Ask for so many prompts, 16 at a time. An answer that is none is the reason why."""
    found: dict[int, list[int] | str] = {}
    left = iter(range(count))

    async def client() -> None:
        for number in left:
            found[number] = "no answer in time"
            with trio.move_on_after(ANSWER_S):
                answer = await cluster.ask(prompt=prompt(number), max_tokens=OUTPUT, ignore_eos=True)
                found[number] = answer.tokens if answer.status == 200 else answer.body.decode()

    async with trio.open_nursery() as nursery:
        for _ in range(CONCURRENCY):
            nursery.start_soon(client)
    return [found[number] for number in range(count)]


def run(case: ServedCase, count: int, times: int = 1) -> list[list[list[int] | str]]:
    """Return the answers of a cluster, asked so many times."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "scenario.toml")
        file.write_text(case.scenario(str(MODEL)))
        with served(Path(folder), file) as cluster:
            found = [trio.run(answers, cluster, count) for _ in range(times)]
            wrong = [answer for answer in found[0] if isinstance(answer, str)]
            if wrong:
                sys.stdout.write(f"{case}: {wrong[0]}\n{cluster.log.read_text()[-3000:]}\n")
            return found


def likeliest(found: list[list[int] | str]) -> int:
    """Return how many answers have a token that transformers finds less likely than another one, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).to("cuda").eval()
    unlike = 0
    for number, answer in enumerate(found):
        own = prompt(number)
        whole = torch.tensor([[*own, *(answer if isinstance(answer, list) else [])]], device="cuda")
        with torch.inference_mode():
            logits = model(whole).logits[0, len(own) - 1 : -1]
        unlike += logits.argmax(-1).tolist() != answer
    return unlike


def differing(one: list[Any], other: list[Any]) -> int:
    return sum(a != b for a, b in zip(one, other, strict=True))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu identity")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--only", default="", metavar="WORDS", help="cases with these words in their names")
    parser.add_argument("--jobs", type=int, default=5, help="clusters at once (default: 5)")
    asked = parser.parse_args(arguments)
    good = True
    chosen = [case for case in (*cases(), *cases("bf16")) if all(term in str(case) for term in asked.only.split())]
    for dtype in sorted({case.dtype for case in chosen}, reverse=True):
        expected, again = run(alone(dtype), asked.requests, 2)
        itself = differing(expected, again)
        sys.stdout.write(f"one engine, {dtype}: {itself} of {asked.requests} answers differ from its own\n")
        if dtype == "fp32":
            unlike = likeliest(expected)
            good &= not unlike
            sys.stdout.write(f"one engine, {dtype}: {unlike} answers are not the likeliest by transformers\n")

        def judged(case: ServedCase, expected: Any = expected) -> tuple[int, int, float]:
            begun = perf_counter()
            (found,) = run(case, asked.requests)
            none = sum(isinstance(answer, str) for answer in found)
            return differing(expected, found), none, perf_counter() - begun

        with ThreadPoolExecutor(asked.jobs) as pool:
            of_dtype = [case for case in chosen if case.dtype == dtype]
            for case, (differ, none, lasted) in zip(of_dtype, pool.map(judged, of_dtype), strict=True):
                good &= not none and (dtype != "fp32" or not differ)
                sys.stdout.write(f"{case}  {differ} of {asked.requests} differ, {none} failed, {lasted:.0f} s\n")
                sys.stdout.flush()
    return 0 if good else 1
