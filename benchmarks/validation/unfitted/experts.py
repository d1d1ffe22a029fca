"""Throughput past saturation, with experts over many GPUs: SGLang's DeepSeek-V3 on 4 and 9 nodes of 8 H100 (LMSYS,
lmsys.org/blog/2025-05-05-large-scale-ep).

The source measured prefill and decode apart, each with as much of the other as it could use: here the other side takes
no time. It states 16,384 prompt tokens a GPU, 256 sequences a GPU in decode with 2,000 tokens of context each. It
overlaps two batches and copies frequent experts, which pdflow does not model; it leaves out how lengths vary.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean
from typing import Final

from benchmarks.validation.common import latencies, table, world_of

NODE_GPUS: Final = 8
PROMPTS: Final = {1024: 57_674, 2048: 54_543, 4096: 50_302}
"""Input tokens per second and node with experts over 32 GPUs, by prompt length."""
DECODES: Final = 22_282
"""Output tokens per second and node with experts over 72 GPUs."""
GPU_TOKENS, GPU_SEQUENCES, CONTEXT, STEPS = 16_384, 256, 2_000, 20
"""Of `STEPS` decode steps the mean is taken, so that the context stays at what is stated."""

FREE: Final = """gpu = { preset = "h200", device_bytes = 2_000_000_000_000 }
max_num_seqs = 100000
max_num_batched_tokens = 100000000
kv_tokens = 1000000000
api_server_s = 0
cost = { model = "constant", prefill_s = 0, decode_step_s = 0 }"""
"""An engine that takes no time."""


def _text(clients: int, requests: int, tokens: tuple[int, int], prefill: str, decode: str) -> str:
    return f"""
[workload]
requests = {requests}
arrival = {{ process = "closed", concurrency = {clients} }}
input_tokens = {tokens[0]}
output_tokens = {tokens[1]}
[model]
preset = "deepseek-v3"
[network]
preset = "ideal"
[[pool]]
name = "prefill"
role = "prefill"
{prefill}
[[pool]]
name = "decode"
role = "decode"
{decode}
"""


def prompt_tokens_per_s(tokens: int, gpus: int = 32) -> float:
    """Of one node, when every GPU always has prompts."""
    clients = gpus * 4 * GPU_TOKENS // tokens
    engine = f"""gpu = "h100-sxm"
dp_attention = {gpus}
ep = {gpus}
max_num_batched_tokens = {GPU_TOKENS}
api_server_s = 0"""
    world = world_of(_text(clients, 2 * clients, (tokens, 2), engine, FREE))
    return 2 * clients * tokens / (world.totals.duration_ns / 1e9) / (gpus / NODE_GPUS)


def answer_tokens_per_s(gpus: int = 72) -> float:
    """Of one node, when every GPU has its sequences."""
    clients = gpus * GPU_SEQUENCES
    engine = f"""gpu = "h100-sxm"
dp_attention = {gpus}
ep = {gpus}
kv_tokens = {GPU_SEQUENCES * (CONTEXT + 200)}
api_server_s = 0"""
    world = world_of(_text(clients, clients, (CONTEXT, STEPS), FREE, engine))
    return NODE_GPUS * GPU_SEQUENCES / fmean(tpot for _, tpot in latencies(world)) * 1e3


def lines() -> Iterator[str]:
    rows = [
        (f"prefill, 32 GPUs, prompts of {tokens:,} tokens", published, prompt_tokens_per_s(tokens))
        for tokens, published in PROMPTS.items()
    ]
    rows.append((f"decode, 72 GPUs, {GPU_SEQUENCES} sequences of {CONTEXT:,} tokens", DECODES, answer_tokens_per_s()))
    yield from table(
        ["tokens per second and node", "published", "pdflow", "error"],
        [
            (name, f"{published:,}", f"{found:,.0f}", f"{found / published - 1:+.0%}".replace("%", " %"))
            for name, published, found in rows
        ],
    )
