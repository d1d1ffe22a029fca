"""The options of `pdflow bench`: those of `vllm bench serve` that matter here, by its names, and a few of our own.

What they mean together is decided where they are used (runtime/pdflow_runtime/bench/asked.py, plan.py).
"""

from __future__ import annotations

from typing import Any

import click

_AT_LEAST_0, _AT_LEAST_1 = click.IntRange(0), click.IntRange(1)

_SERVER = (
    click.option("--base-url", metavar="URL", help="The server's URL, instead of --host and --port."),
    click.option("--host", default="127.0.0.1", metavar="NAME", help="The server's host. Default: 127.0.0.1."),
    click.option(
        "--port", type=click.IntRange(1, 65_535), default=8000, metavar="N", help="The server's port. Default: 8000."
    ),
    click.option(
        "--endpoint", metavar="PATH", help="Path of the API. Default: /v1/completions, or the path for chats."
    ),
    click.option(
        "--backend",
        type=click.Choice(["openai", "vllm", "openai-chat"]),
        default="openai",
        help="The API: completions (openai, vllm) or chats.",
    ),
    click.option("--model", metavar="NAME", help="The model to request. Default: the first that the server lists."),
    click.option("--header", multiple=True, metavar="KEY=VALUE", help="HTTP header of every request. Repeatable."),
    click.option(
        "--ready-check-timeout-sec",
        type=float,
        default=0.0,
        metavar="S",
        help="Wait up to S seconds for the server to start.",
    ),
    click.option(
        "--num-warmups",
        type=_AT_LEAST_0,
        default=0,
        metavar="N",
        help="Requests to send first, which are not measured.",
    ),
)
_REQUESTS = (
    click.option("--scenario", type=click.Path(), metavar="FILE", help="Send the workload of a scenario file."),
    click.option(
        "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Replace one value of the scenario. Repeatable."
    ),
    click.option(
        "--dataset-name",
        metavar="NAME",
        help="random, sharegpt, custom, trace, or a trace format of docs/traces.md.",
    ),
    click.option(
        "--dataset-path", type=click.Path(), metavar="FILE", help="The dataset's file; nothing is downloaded."
    ),
    click.option(
        "--column", "columns", multiple=True, metavar="KEY=NAME", help="For CSV: the column that has KEY. Repeatable."
    ),
    click.option(
        "--num-prompts", type=_AT_LEAST_1, metavar="N", help="Number of requests. Default: 1000, or all of a trace."
    ),
    click.option(
        "--random-input-len", type=_AT_LEAST_1, default=1024, metavar="N", help="Tokens of a prompt. Default: 1024."
    ),
    click.option(
        "--random-output-len", type=_AT_LEAST_1, default=128, metavar="N", help="Tokens of an answer. Default: 128."
    ),
    click.option(
        "--random-range-ratio",
        type=float,
        default=0.0,
        metavar="R",
        help="Draw lengths from 1 - R to 1 + R times these values.",
    ),
    click.option(
        "--request-rate",
        type=float,
        metavar="RPS",
        help="Requests per second; inf: all at once. Default: the trace's own times, or inf.",
    ),
    click.option(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="SHAPE",
        help="Shape of gamma-distributed gaps: 1 is Poisson, less is burstier, inf is even.",
    ),
    click.option(
        "--max-concurrency", type=_AT_LEAST_1, metavar="N", help="Maximum number of open requests; others wait."
    ),
    click.option(
        "--seed", type=int, metavar="N", help="Seed of lengths, times and contents. Default: the scenario's, or 0."
    ),
)
_ANSWERS = (
    click.option(
        "--ignore-eos/--respect-eos",
        default=None,
        help="Ignore EOS, so that answers have the drawn lengths. Default with --scenario.",
    ),
    click.option(
        "--return-token-ids/--no-token-ids",
        default=None,
        help="Request token ids and count them. Default with sessions.",
    ),
    click.option("--temperature", type=float, metavar="T", help="Sampling temperature. Default: 0."),
    click.option("--top-p", type=float, metavar="P", help="Sampling top_p, as in OpenAI's API."),
    click.option("--top-k", type=int, metavar="K", help="Sampling top_k, as in vLLM's API."),
    click.option("--extra-body", metavar="JSON", help="Additional fields of every request."),
)
_RESULTS = (
    click.option(
        "--percentile-metrics",
        default="ttft,tpot,itl",
        metavar="NAMES",
        help="Reported latencies: ttft, tpot, itl (default), e2el, client_queue_time, e2el_including_client_queue.",
    ),
    click.option(
        "--metric-percentiles", default="99", metavar="P,P", help="Percentiles in the result file. Default: 99."
    ),
    click.option(
        "--goodput",
        multiple=True,
        metavar="NAME:MS",
        help="Bounds in ms that a good request meets, such as ttft:500 tpot:50 itl:80@p99 e2el:9000.",
    ),
    click.option("--label", metavar="TEXT", help="Name of the run."),
    click.option(
        "--metadata", multiple=True, metavar="KEY=VALUE", help="Additional key of the result file. Repeatable."
    ),
    click.option("--save-result", is_flag=True, help="Write vLLM's result file."),
    click.option("--save-detailed", is_flag=True, help="Include each request's lengths, times and text."),
    click.option("--append-result", is_flag=True, help="Append to the result file, as one line."),
    click.option(
        "--result-dir",
        type=click.Path(file_okay=False),
        metavar="DIR",
        help="Directory of the result file. Default: the current one.",
    ),
    click.option("--result-filename", metavar="NAME", help="Name of the result file. Default: as vLLM names it."),
    click.option(
        "--out", type=click.Path(file_okay=False), metavar="DIR", help="Write results.json and requests.jsonl."
    ),
    click.option("--quiet", is_flag=True, help="Print no progress and no table."),
    click.argument("more", nargs=-1, metavar="[NAME:MS]..."),
)


def bench_options(command: Any) -> Any:
    """All of them. Words that stand alone are `more`: vLLM's --goodput takes several."""
    for option in reversed((*_SERVER, *_REQUESTS, *_ANSWERS, *_RESULTS)):
        command = option(command)
    return command
