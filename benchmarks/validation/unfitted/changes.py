"""Causes of errors, as far as one change of a scenario shows them. None is used for any other figure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from benchmarks.validation.common import error_text, table
from benchmarks.validation.unfitted.rows import Answer, Change, Row, errors, simulated

Chosen = Callable[[Row], bool]
CHANGES: Final[tuple[tuple[str, Chosen, tuple[tuple[str, Change], ...]], ...]] = (
    (
        "silybench, 1 client",
        lambda row: row.source == "silybench" and row.clients == 1,
        (("API server 5 ms instead of 30", Change(pool="api_server_s = 0.005")),),
    ),
    (
        "silybench, fp8, 2,048 and 8,192 tokens in",
        lambda row: row.source == "silybench" and "fp8" in row.model and row.input_tokens > 1000,
        (
            ("API server 5 ms", Change(pool="api_server_s = 0.005")),
            (
                "API server 5 ms, `ec_fp8` 0.45 instead of 0.56",
                Change(pool="api_server_s = 0.005", gpu="ec_fp8 = 0.45"),
            ),
        ),
    ),
    (
        "mooncake-h800",
        lambda row: row.source == "mooncake-h800",
        (("API servers 15 ms instead of 30", Change(pool="api_server_s = 0.015")),),
    ),
    (
        "mooncake-h20, from 1,024 tokens in",
        lambda row: row.source == "mooncake-h20" and row.input_tokens >= 1024,
        (("`ec` 1 instead of 0.8", Change(gpu="ec = 1.0")),),
    ),
    (
        "dstack-r1, vLLM on MI300X",
        lambda row: row.id.startswith("vllm-mi300x"),
        (
            ("38 ms of host time a step", Change(gpu="host_step_s = 0.038")),
            ("`ec` and `em` of section 3's calibration", Change(gpu="ec = 0.113, em = 0.501")),
        ),
    ),
    (
        "dstack-r1, vLLM on H200",
        lambda row: row.id.startswith("vllm-h200"),
        (("20 ms of host time a step", Change(gpu="host_step_s = 0.02")),),
    ),
    (
        "nim-course, 50 and 100 clients",
        lambda row: row.source == "nim-course" and row.clients >= 50,
        (("0.06 ms of host time a sequence", Change(gpu="host_seq_s = 60e-6")),),
    ),
    (
        "nim-course, 2,000/2,000, 10 clients",
        lambda row: row.source == "nim-course" and row.clients == 10,
        (
            ("a step takes the prompts of all clients", Change(pool="max_num_batched_tokens = 131072")),
            ("lengths vary by 20 %", Change(lengths_vary=True)),
        ),
    ),
    (
        "silybench, from 4 clients",
        lambda row: row.source == "silybench" and row.clients >= 4,
        (("lengths vary by 20 %", Change(lengths_vary=True)),),
    ),
    (
        "inferencex",
        lambda row: row.source == "inferencex",
        (("lengths vary by 20 %", Change(lengths_vary=True)),),
    ),
    (
        "nim-docs, from 5 clients",
        lambda row: row.source == "nim-docs" and row.clients >= 5,
        (("lengths vary by 20 %", Change(lengths_vary=True)),),
    ),
    (
        "dstack-ratios, 32 clients",
        lambda row: row.source == "dstack-ratios" and row.clients == 32,
        (("4 ms of host time a step", Change(gpu="host_step_s = 0.004")),),
    ),
    (
        "sglang-a10",
        lambda row: row.source == "sglang-a10",
        (("all-reduces as over NVLink", Change(gpu="allreduce_latency_s = 1e-5")),),
    ),
    (
        "llm-d, P/D",
        lambda row: row.source == "llm-d" and "+" in row.pools,
        (("blocks of 16, pdflow's default", Change(pool="block_size = 16")),),
    ),
    (
        "llm-d, aggregated",
        lambda row: row.source == "llm-d" and "+" not in row.pools,
        (("`ec` 0.34 instead of 0.68", Change(gpu="ec = 0.34")),),
    ),
)

WRONG: Final = """\
- **The presets describe engines of 2026.** TPOT of vLLM 0.30 (silybench, September 2026) is within a few per cent in
  the median, and of SGLang 0.5.7 (inferencex, March 2026) within 25 %. With vLLM 0.7 the same model on the same GPU
  takes two to three times as long, and on MI300X up to five times (dstack-r1, March 2025): a step takes 17 to 40 ms
  more, on MI300X whatever the batch. NIM of 2024 takes some 0.05 ms more for each sequence of a step. For such engines
  set `host_step_s` and `host_seq_s`, or calibrate.
- **TTFT of dstack-r1** is four to ten times the simulated one on H200 and on MI300X alike, so that it says more of
  those engines than of the GPU. The factors that section 3 calibrated on MI300X bring it nearer, not near.
- **API servers of 30 ms** are too slow for a bare vLLM, which answers a prompt of 128 tokens in 14 ms (silybench), and,
  for short prompts, for two of them (46 ms, mooncake-h800). With 5 or 15 ms, TTFT of long prompts is too short: the
  default hides a prefill that is some 20 to 30 % too fast.
- **Fixed lengths in closed loops.** Real engines keep waves, at least in part: with N clients, TTFT of NIM of 2024 is
  as if all prompts of a wave were in one step, and that of vLLM 0.30 grows with N as fast as pdflow's or faster where
  answers are long. With short answers (1,024/128), and where lengths may vary (nim-docs), real requests spread, and
  TTFT lies between that of fixed lengths and of lengths that vary by 20 %. What spreads requests more than real engines
  do makes the first kind of row worse.
- **Mixtures of experts on the H20.** Long prompts run near the GPU's peak FLOP/s, which `ec` 0.8, with the factor of
  1.5 for the arithmetic of experts, does not allow.
- **gpt-oss-120b in small batches.** Steps of SGLang's decode engines take 3 ms more than those of the preset, so that
  TPOT with 32 clients is too low; with 128 clients it is within 15 % where P is not saturated.
- **TTFT of P/D with many clients** (dstack-ratios, 128 clients and 128 tokens in; llm-d) is two to ten times the
  simulated one. P and D are not saturated in simulation. The sources do not say where the time is spent.
- **llm-d's aggregated engines** have TPOT three times the simulated one. The figures are of an older run; with prompts
  computed at half the speed, simulated TPOT is about a third too long and TTFT half as long. So the two designs are
  compared with different engines, and that pdflow ranks them equal contradicts no measurement of one engine.
- **Comparisons that cannot be written as scenarios**, because the source states neither engines nor GPU, or shows only
  pictures: Qwen3-32B on 10 H200 with Dynamo (a gist of 2025-10-22), DeepSeek-V2-Lite on four nodes with EFA
  (pythonsheets.com, 2026-03-10), NVIDIA's topologies of Llama-3.3-70B, DistServe, Splitwise, TaiChi, and TensorRT-LLM's
  posts.
"""


def lines(answers: Sequence[tuple[Row, Answer]]) -> Iterator[str]:
    found: list[Sequence[object]] = []
    for name, chosen, changes in CHANGES:
        of_change = [(row, answer) for row, answer in answers if chosen(row)]
        variants = [("as stated", of_change)]
        variants += [(what, [(row, simulated(row, change)) for row, _ in of_change]) for what, change in changes]
        for what, changed in variants:
            cells = [error_text(errors(changed, figure)) for figure in ("ttft_ms", "tpot_ms")]
            found.append((f"{name} ({len(of_change)}): {what}", *cells))
    yield from table(["rows and change", "TTFT", "TPOT"], found)
