"""The options of `pdflow bench`: those of `vllm bench serve` that matter here, by its names, and a few of our own.

What they mean together is decided where they are used (runtime/pdflow_runtime/bench/asked.py, plan.py).
"""

from __future__ import annotations

from typing import Any

import click

_AT_LEAST_0, _AT_LEAST_1 = click.IntRange(0), click.IntRange(1)

_SERVER = (
    click.option("--base-url", metavar="URL", help="Whom to ask, instead of --host and --port."),
    click.option("--host", default="127.0.0.1", metavar="NAME", help="The server's; 127.0.0.1 if absent."),
    click.option(
        "--port", type=click.IntRange(1, 65_535), default=8000, metavar="N", help="The server's; 8000 if absent."
    ),
    click.option("--endpoint", metavar="PATH", help="Of the API; /v1/completions, or that for chats."),
    click.option(
        "--backend",
        type=click.Choice(["openai", "vllm", "openai-chat"]),
        default="openai",
        help="Completions, or chats.",
    ),
    click.option("--model", metavar="NAME", help="What to ask for; the first that the server names if absent."),
    click.option("--header", multiple=True, metavar="KEY=VALUE", help="Sent with every request. Repeatable."),
    click.option(
        "--ready-check-timeout-sec", type=float, default=0.0, metavar="S", help="Wait so long for the server to be up."
    ),
    click.option(
        "--num-warmups", type=_AT_LEAST_0, default=0, metavar="N", help="Requests beforehand that are not counted."
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
        help="random, sharegpt, custom, trace, or a trace's format, as docs/traces.md has them.",
    ),
    click.option("--dataset-path", type=click.Path(), metavar="FILE", help="Of the dataset; nothing is downloaded."),
    click.option(
        "--column", "columns", multiple=True, metavar="KEY=NAME", help="Of CSV: which column says what. Repeatable."
    ),
    click.option("--num-prompts", type=_AT_LEAST_1, metavar="N", help="How many requests; 1000, or all of a trace."),
    click.option(
        "--random-input-len", type=_AT_LEAST_1, default=1024, metavar="N", help="Tokens of a prompt; 1024 if absent."
    ),
    click.option(
        "--random-output-len", type=_AT_LEAST_1, default=128, metavar="N", help="Tokens of an answer; 128 if absent."
    ),
    click.option(
        "--random-range-ratio",
        type=float,
        default=0.0,
        metavar="R",
        help="Lengths from 1 - R to 1 + R of these.",
    ),
    click.option(
        "--request-rate",
        type=float,
        metavar="RPS",
        help="Requests per second, or inf: all at once. A trace's own times, or inf, if absent.",
    ),
    click.option(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="SHAPE",
        help="Of gamma gaps: 1 is Poisson, less comes in bursts, inf is even.",
    ),
    click.option("--max-concurrency", type=_AT_LEAST_1, metavar="N", help="At most so many open; others wait here."),
    click.option("--seed", type=int, metavar="N", help="Of lengths, times and contents; the scenario's, or 0."),
)
_ANSWERS = (
    click.option("--ignore-eos/--respect-eos", default=None, help="As many tokens as asked; so with --scenario."),
    click.option(
        "--return-token-ids/--no-token-ids", default=None, help="Ask for token ids and count them; so with sessions."
    ),
    click.option("--temperature", type=float, metavar="T", help="0 if absent."),
    click.option("--top-p", type=float, metavar="P", help="As in OpenAI's API."),
    click.option("--top-k", type=int, metavar="K", help="As in vLLM's."),
    click.option("--extra-body", metavar="JSON", help="Fields that go with every request."),
)
_RESULTS = (
    click.option(
        "--percentile-metrics",
        default="ttft,tpot,itl",
        metavar="NAMES",
        help="What the result file quotes: ttft,tpot,itl; also e2el, client_queue_time, e2el_including_client_queue.",
    ),
    click.option("--metric-percentiles", default="99", metavar="P,P", help="And at which percentiles; 99 if absent."),
    click.option(
        "--goodput", multiple=True, metavar="NAME:MS", help="Bounds a good request meets: ttft:500 tpot:50 e2el:9000."
    ),
    click.option("--label", metavar="TEXT", help="What the run is called."),
    click.option("--metadata", multiple=True, metavar="KEY=VALUE", help="A key of the result file. Repeatable."),
    click.option("--save-result", is_flag=True, help="Write vLLM's result file."),
    click.option("--save-detailed", is_flag=True, help="With each request's lengths, times and text."),
    click.option("--append-result", is_flag=True, help="To that file, as one line more."),
    click.option(
        "--result-dir", type=click.Path(file_okay=False), metavar="DIR", help="Where it goes; here if absent."
    ),
    click.option("--result-filename", metavar="NAME", help="As vLLM names it if absent."),
    click.option(
        "--out", type=click.Path(file_okay=False), metavar="DIR", help="Write results.json and requests.jsonl."
    ),
    click.option("--quiet", is_flag=True, help="Nothing while it runs, and no table."),
    click.argument("more", nargs=-1, metavar="[NAME:MS]..."),
)


def bench_options(command: Any) -> Any:
    """All of them. Words that stand alone are `more`: vLLM's --goodput takes several."""
    for option in reversed((*_SERVER, *_REQUESTS, *_ANSWERS, *_RESULTS)):
        command = option(command)
    return command
