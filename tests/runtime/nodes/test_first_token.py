"""P's token given to the client: what it hears, and what is left of it, is as if one engine had answered alone. With
late requests hedged, too, in a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

pytest.importorskip("torch", reason="needs torch: pip install 'pdflow[live]'")

from pdflow.engine.sequence import Phase
from pdflow.methods.catalogue import METHODS
from pdflow.protocol.ids import KvParams
from pdflow.results.comparison.runs import OneRun
from pdflow.results.files.read import read_runs
from pdflow.scenario.reading.load import load
from pdflow.serving.decode_request import DecodeStage
from pdflow_runtime.engines.job import Sampling
from pdflow_runtime.nodes.models import TorchModel
from pdflow_sim.check.counterexamples.trace import follow
from tests.runtime.support.fronted import Fronted, fronted
from tests.runtime.support.live_pair import answer_of, cluster, live_pair, prompt
from tests.runtime.support.served import Completion, served

QUICKSTART = Path(__file__).resolve().parents[3] / "examples/serve-quickstart.toml"
LENGTHS = (1, 15, 16, 17, 100)
"""Where a prompt fills its last block, the first token needs another."""


def with_first(*overrides: str) -> Any:
    return cluster("router.first_token=prefill", *overrides)


async def quiet(town: Fronted) -> None:
    with trio.fail_after(10):
        while town.node.calls or town.node.legs:
            await trio.sleep(0.01)
    await town.home.quiet()


@pytest.mark.parametrize(
    ("method", "dispatch"), [*((method, "concurrent") for method in METHODS), ("nixl-push", "sequential")]
)
@pytest.mark.trio
async def test_the_answers_are_those_of_one_engine_alone(method: str, dispatch: str, model: TorchModel) -> None:
    scenario = with_first(f"transfer.method={method}", f"router.dispatch={dispatch}")
    async with fronted(scenario, model) as town, trio.open_nursery() as nursery:

        async def ask(length: int, stream: bool) -> None:
            fields: dict[str, Any] = {"prompt": prompt(length, length), "max_tokens": 6, "ignore_eos": True}
            await town.same(**fields, temperature=0, stream=stream, return_token_ids=True)

        for length in LENGTHS:
            for stream in (False, True):
                nursery.start_soon(ask, length, stream)
        await town.same(prompt=prompt(40), max_tokens=1, temperature=0)
    assert town.home.d.engine.prompt_tokens_computed == 2 * len(LENGTHS), "D computes P's token, and no prompt"


@pytest.mark.parametrize("dispatch", ["sequential", "concurrent"])
@pytest.mark.trio
async def test_whatever_a_client_asks_for(dispatch: str, model: TorchModel) -> None:
    """Of chats, too: texts, likelihoods, usage, stop strings that begin in P's token or are in it."""
    async with fronted(with_first(f"router.dispatch={dispatch}"), model) as town:
        completion: dict[str, Any] = {"prompt": "Once upon a time", "temperature": 0, "ignore_eos": True}
        (plain,) = await town.same(**completion, max_tokens=12, logprobs=2)
        text = plain["choices"][0]["text"]
        for stream in (False, True):
            how: dict[str, Any] = {"stream": stream} | ({"stream_options": {"include_usage": True}} if stream else {})
            for more in (
                {"max_tokens": 1},
                {"max_tokens": 2, "logprobs": 3},
                {"max_tokens": 12, "logprobs": 0, "return_token_ids": True},
                {"max_tokens": 12, "stop": text[0]},
                {"max_tokens": 12, "stop": text[:2]},
                {"max_tokens": 12, "stop": [text[1:4], text[:5]]},
                {"max_tokens": 12, "temperature": 1.3, "seed": 5},
            ):
                await town.same(**(completion | how | more))
            chat: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0}
            await town.same("/v1/chat/completions", **chat, **how, max_tokens=8, logprobs=True, top_logprobs=2)
            await town.same("/v1/chat/completions", **chat, **how, max_tokens=1)
        lie = {"first": {"token": 7, "id": "cmpl-mine", "created": 1}, "first_follows": True}
        (answer,) = await town.ask(
            town.port, "/v1/completions", {**completion, "max_tokens": 12, "logprobs": 2, "pdflow": lie}
        )
        assert answer == plain, "what clients say of a first token is not passed on"
        await quiet(town)


@pytest.mark.parametrize("method", ["nixl-push", "p2p-nccl-put"])
@pytest.mark.trio
async def test_kv_that_waits_for_ps_token_is_released_with_its_request(method: str, model: TorchModel) -> None:
    async with live_pair(with_first(f"transfer.method={method}"), model) as home:
        sampling = Sampling(max_tokens=4, ignore_eos=True)
        params = KvParams(home.p.config.info, "x-r", "r", 0)
        for is_known in (False, True):
            prefill = home.p.begin("r", "x-r", prompt(100), sampling)
            leg = home.d.begin("r", params, prompt(100), sampling, first_follows=True)
            with trio.fail_after(20):
                await prefill.answered.wait()
                while home.d.decoding.stage_of("r") is not DecodeStage.LOADED:
                    await trio.sleep(0.01)
            assert leg.job.seq.phase is Phase.LOADING, "its KV is here, and it does not decode yet"
            if is_known:
                assert prefill.token is not None
                home.d.set_first_token(leg, prefill.token.token)
                answer = await answer_of(leg)
                alone = await home.ask_alone("a", prompt(100), sampling)
                assert [prefill.token.token, *answer.tokens] == alone.tokens
            else:
                home.d.abort(leg)
            await home.quiet()
            assert not home.d.known()


@pytest.mark.trio
async def test_a_token_outside_the_vocabulary_is_refused_on_arrival(model: TorchModel) -> None:
    """It would have ended the engine's steps."""
    async with fronted(with_first(), model) as town:
        for path, more in (
            ("/first_token", {"token": 10**6, "id": "a", "created": 1}),
            ("/v1/completions", {"prompt": prompt(9), "pdflow": {"first": {"token": -1, "id": "a", "created": 1}}}),
            ("/v1/completions", {"prompt": prompt(9), "pdflow": {"first": 5}}),
        ):
            (refusal,) = await town.ask(town.alone, path, more)
            assert refusal["error"]["message"].startswith("pdflow: "), refusal


@pytest.mark.parametrize("dispatch", ["sequential", "concurrent"])
@pytest.mark.trio
async def test_an_answer_that_ends_with_its_first_token_holds_no_blocks(dispatch: str, model: TorchModel) -> None:
    """Its lease would be 30 s."""
    async with fronted(with_first(f"router.dispatch={dispatch}"), model) as town:
        fields: dict[str, Any] = {"prompt": prompt(40), "temperature": 0, "ignore_eos": True}
        (one,) = await town.same(**fields, max_tokens=1, return_token_ids=True)
        token = one["choices"][0]["token_ids"]
        for stream in (False, True):
            events = await town.same(**fields, max_tokens=9, stop_token_ids=token, stream=stream)
            assert events[-1]["choices"][0]["finish_reason"] == "stop"
        await quiet(town)


@pytest.mark.slow
@pytest.mark.trio
async def test_a_cluster_of_both_answers_right_and_holds_nothing(tmp_path: Path) -> None:
    """Nearly every request is late, and has two attempts; the machine that is checked answers as it was answered."""
    overrides = ("router.first_token=prefill", "router.hedge_after_s=0.005", "transfer.kv_lease_duration_s=300")
    with served(tmp_path, QUICKSTART, *overrides, events=tmp_path / "run") as cluster:
        fields: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}
        alone = [await cluster.ask(prompt=prompt(300, number), **fields) for number in range(8)]
        together: dict[int, Completion] = {}

        async def ask(number: int) -> None:
            together[number] = await cluster.ask(prompt=prompt(300, number % 8), **fields, stream=number % 2 == 0)

        async with trio.open_nursery() as nursery:
            for number in range(24):
                nursery.start_soon(ask, number)
        for number, answer in together.items():
            assert (answer.tokens, answer.text) == (alone[number % 8].tokens, alone[number % 8].text)
        with trio.fail_after(60):
            while True:
                state = msgspec.json.decode((await cluster.exchange("GET", "/admin/state"))[1])
                if all(engine["free"] == engine["blocks"] for engine in state["engines"].values()):
                    break
                await trio.sleep(0.1)
    assert follow(load(QUICKSTART, overrides=overrides), tmp_path / "run/events.jsonl").events
    run = read_runs(tmp_path / "run")
    assert isinstance(run, OneRun)
    assert run.records.outcome == ["completed"] * 32
    assert run.records.output_tokens == [12] * 32
    rows = (tmp_path / "run/requests.jsonl").read_bytes().splitlines()
    assert max(msgspec.json.decode(row)["attempts"] for row in rows) == 2


@pytest.mark.trio
async def test_who_hangs_up_leaves_nothing_behind(model: TorchModel) -> None:
    async with fronted(with_first("router.dispatch=concurrent"), model) as town:
        for pause_s in (0.0, 0.005, 0.02, 0.1):
            async with trio.open_nursery() as nursery:
                for number in range(4):
                    fields = {"prompt": prompt(700, number), "max_tokens": 500, "ignore_eos": True, "stream": True}
                    nursery.start_soon(town.ask, town.port, "/v1/completions", fields)
                await trio.sleep(pause_s)
                nursery.cancel_scope.cancel()
        await quiet(town)
