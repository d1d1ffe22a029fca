"""Where the rows of rows.csv come from."""

from __future__ import annotations

from typing import Final

import attrs


@attrs.frozen(kw_only=True)
class Source:
    """Where rows come from: what it states in addition to the columns of the rows, and what it leaves out."""

    name: str
    address: str
    states: str
    leaves_out: str


SOURCES: Final = {
    "nim-course": Source(
        name="NVIDIA NIM, data of a course on sizing, about 2024",
        address="github.com/wbing520/ai-performance-engineering/tree/main/"
        "code/ch10_inference/inference_gpu_cluster_sizing/dataset/nim.csv",
        states="Llama 3 in 16 bits, TensorRT-LLM in NIM, GenAI-Perf; mean TTFT and inter-token latency",
        leaves_out="versions (a file next to it is of TensorRT-LLM 0.9.0), requests sent, KV capacity, batch slots",
    ),
    "nim-docs": Source(
        name="NVIDIA NIM 1.8.0, benchmarking guide",
        address="docs.nvidia.com/nim/benchmarking/llm/1.0.0/performance.md",
        states="Llama-3.3-70B in 8 bits, two H100 80 GB, TP2; mean TTFT and inter-token latency",
        leaves_out="engine, KV dtype and capacity, requests sent; the model's sizes are those of 3.1",
    ),
    "silybench": Source(
        name="silybench, 2026-09-24 (CC BY 4.0)",
        address="github.com/tgarg01/silybench-data/tree/main/derived/csv/perf_points.csv",
        states="vLLM 0.30.0 on one H100, `vllm bench serve` with exact lengths, KV tokens from the log; 95th "
        "percentiles of TTFT and TPOT, median of three runs; fp8 is vLLM's dynamic quantisation",
        leaves_out="nothing that a scenario needs",
    ),
    "dstack-r1": Source(
        name="dstack, DeepSeek-R1 on H200 and MI300X, 2025-03-18",
        address="github.com/dstackai/benchmarks/tree/main/Deepseek-R1",
        states="vLLM 0.7.3 and 0.7.4 (developer builds), SGLang 0.4.2, TP8, 500 requests, exact lengths; medians",
        leaves_out="KV capacity",
    ),
    "inferencex": Source(
        name="InferenceX, DeepSeek-R1-0528 on H200, 2026-03-05",
        address="github.com/SemiAnalysisAI/InferenceX/issues/870",
        states="SGLang 0.5.7, fp8, TP8 without expert parallelism; means",
        leaves_out="how lengths vary, requests sent. Its row of 4 clients and 1,024/1,024 is not used: it is slower "
        "than that of 8 clients, on another machine",
    ),
    "vllm-ci": Source(
        name="vLLM's performance benchmark, latency tests",
        address="buildkite.com/vllm/performance-benchmark/builds/9515 (H200) and a copy of its table for 8 x H100",
        states="a batch of 8 given to the engine without a server, 32 tokens in, 128 out; mean E2E",
        leaves_out="version and date",
    ),
    "mooncake-h800": Source(
        name="Mooncake, vLLM V1 with MooncakeConnector",
        address="github.com/kvcache-ai/Mooncake/blob/main/docs/source/performance/vllm/vllm-v1-pd-performance.md",
        states="vLLM 0.11.2 (developer build), Qwen3-8B, 1P1D of TP8 on two nodes, 8 NICs with 200 GB/s together, one "
        "client, 50 requests; TTFT",
        leaves_out="dtype, whether TTFT is a mean",
    ),
    "mooncake-h20": Source(
        name="Mooncake, SGLang with Mooncake, 2026-07-15",
        address="github.com/kvcache-ai/Mooncake/blob/main/docs/source/performance/sglang/sglang-benchmark-results-v1.md",
        states="Qwen3-235B-A22B in bf16, 1P1D of TP8 on two nodes of 8 H20-3e, 200 GB/s a node, one client, 50 "
        "requests; TTFT",
        leaves_out="whether TTFT is a mean; the memory bandwidth of the H20-3e, here that of the H20",
    ),
    "sglang-a10": Source(
        name="Mooncake, SGLang on A10, 1P1D against two engines",
        address="github.com/kvcache-ai/Mooncake/blob/main/docs/source/performance/sglang/sglang-benchmark-results-v1.md",
        states="Qwen2.5-7B-Instruct-GPTQ-Int4, rates, requests, lengths; mean TTFT and inter-token latency",
        leaves_out="versions, links, arrivals (here Poisson), how lengths vary. Its E2E does not follow from TTFT, "
        "inter-token latency and 512 tokens, and is not used",
    ),
    "llm-d": Source(
        name="llm-d's P/D guide, 2026",
        address="github.com/llm-d/llm-d/tree/main/guides/pd-disaggregation: its README (GKE), and its report of "
        "gpt-oss-120b with several tiers (CoreWeave, vLLM 0.27.1)",
        states="gpt-oss-120b on 16 H200, constant rate, 5,400 requests, blocks of 128, NIXL; means. 16 aggregated "
        "engines are an older run, whose inter-token latency is taken as TPOT",
        leaves_out="versions of two of the three runs; what the gateway costs",
    ),
    "dstack-ratios": Source(
        name="dstack, P:D ratios, 2025-09-25",
        address="github.com/dstackai/benchmarks/tree/main/comparison/pd_ratio",
        states="gpt-oss-120b, SGLang with NIXL, engines of TP2 on one node of 8 H200, 500 requests; means. Answers end "
        "by themselves: output is the mean length of each run",
        leaves_out="the version, how answers vary",
    ),
}
