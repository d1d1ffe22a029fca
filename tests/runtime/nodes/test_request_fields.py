"""What a request asks for holds with P and D as with one engine alone: of the token that P samples, too."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import msgspec
import pytest
import trio

pytest.importorskip("torch", reason="needs torch: pip install 'pdflow[live]'")

from pdflow_runtime.http.messages import JSON
from pdflow_runtime.http.openai.sampling import AnswerOptions
from pdflow_runtime.nodes.models import ByteTokens, SyntheticModel, TorchModel
from pdflow_runtime.router.prompts import Prompts
from tests.runtime.http.world import LOCAL
from tests.runtime.support.fronted import Fronted, fronted
from tests.runtime.support.live_pair import cluster, prompt

ASKED: Final[dict[str, Any]] = {"prompt": prompt(40), "ignore_eos": True, "return_token_ids": True}
DRAWN: Final = {"temperature": 1.2, "seed": 5}
KINDS: Final = ("decode", "prefill")
"""Who samples the first token."""


def tokens(answer: list[Any]) -> list[int]:
    return [token for event in answer for choice in event["choices"] for token in choice["token_ids"]]


async def refusal(town: Fronted, **fields: Any) -> dict[str, Any]:
    body = msgspec.json.encode(fields)
    async with town.client.request("POST", LOCAL, town.port, "/v1/completions", (JSON,), body) as response:
        assert response.status == 400
        return dict(msgspec.json.decode(await response.read())["error"])


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("dispatch", ["sequential", "concurrent"])
@pytest.mark.trio
async def test_constraints_hold_for_every_token_of_an_answer(first: str, dispatch: str, model: TorchModel) -> None:
    scenario = cluster(f"router.first_token={first}", f"router.dispatch={dispatch}")
    async with fronted(scenario, model) as town:

        async def answer(**fields: Any) -> list[int]:
            greedy = tokens(await town.same(**(ASKED | {"max_tokens": 12, "temperature": 0} | fields)))
            drawn = tokens(await town.same(**(ASKED | {"max_tokens": 12} | DRAWN | fields)))
            return greedy + drawn

        plain = await answer()
        first_tokens = plain[0], plain[12]
        for token in first_tokens:
            assert token not in await answer(logit_bias={str(token): -100})
        assert {*await answer(allowed_token_ids=[7, 11, 300])} <= {7, 11, 300}
        assert {*await answer(logit_bias={"300": 100}, temperature=0)} == {300}
        few = {"allowed_token_ids": [300, 301, 302, 303]}
        free, counted = await answer(**few), await answer(**few, frequency_penalty=2, presence_penalty=2)
        assert max(Counter(counted[:12]).values()) < max(Counter(free[:12]).values())
        await answer(repetition_penalty=1.7)
        await answer(min_p=0.2)
        await answer(frequency_penalty=2, presence_penalty=2, repetition_penalty=1.3, min_p=0.05, top_k=50)


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.trio
async def test_an_answer_has_as_many_tokens_as_it_has_to(first: str, model: TorchModel) -> None:
    """Neither a stop token nor a stop string ends it before; in P's token neither."""
    async with fronted(cluster(f"router.first_token={first}"), model) as town:
        asked = ASKED | {"max_tokens": 12, "temperature": 0}
        plain = await town.same(**asked)
        stops = tokens(plain)[:3]
        (ended,) = await town.same(**asked, stop_token_ids=stops)
        assert ended["usage"]["completion_tokens"] == 1
        for least in (1, 5, 12):
            (answer,) = await town.same(**asked, stop_token_ids=stops, min_tokens=least)
            assert not {*tokens([answer])[:least]} & {*stops}
            assert answer["usage"]["completion_tokens"] >= least
        text = plain[0]["choices"][0]["text"]
        for least in (0, 1, 4):
            for stream in (False, True):
                stopped = await town.same(**asked, stop=[text[0], text[1]], min_tokens=least, stream=stream)
                assert len(tokens(stopped)) > least
                assert stopped[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.trio
async def test_words_and_special_tokens_of_the_text(first: str, model: TorchModel) -> None:
    async with fronted(cluster(f"router.first_token={first}"), model) as town:
        asked: dict[str, Any] = {"prompt": "Once upon a time", "temperature": 0, "ignore_eos": True, "max_tokens": 12}
        (plain,) = await town.same(**asked)
        text = plain["choices"][0]["text"]
        phrase = text[:2]
        (without,) = await town.same(**asked, bad_words=[phrase], return_token_ids=True)
        banned = model.prompts.bad_words([phrase])
        answer = tokens([without])
        assert all(tuple(answer[at : at + len(each)]) != each for each in banned for at in range(len(answer)))
        for stream in (False, True):
            stop = text[1:4]
            with_stop = await town.same(**asked, stop=stop, include_stop_str_in_output=True, stream=stream)
            found = "".join(event["choices"][0]["text"] for event in with_stop)
            assert found == text[: text.index(stop) + len(stop)]
        # The model's first two ids are special tokens.
        special: dict[str, Any] = asked | {"allowed_token_ids": [0], "max_tokens": 2}
        assert (await town.same(**special))[0]["choices"][0]["text"] == ""
        (spelled,) = await town.same(**special, skip_special_tokens=False)
        assert spelled["choices"][0]["text"] == "<|begin_of_text|>" * 2
        stop_token = asked | {"allowed_token_ids": [1], "ignore_eos": False, "skip_special_tokens": False}
        assert (await town.same(**stop_token))[0]["choices"][0]["text"] == ""
        (ended,) = await town.same(**stop_token, include_stop_str_in_output=True)
        assert ended["choices"][0]["text"] == "<|end_of_text|>"
        assert ended["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.trio
async def test_a_prompt_may_be_truncated(first: str, model: TorchModel) -> None:
    async with fronted(cluster(f"router.first_token={first}"), model) as town:
        asked = ASKED | {"max_tokens": 4, "temperature": 0}
        for side, kept in (("left", prompt(40)[-7:]), ("right", prompt(40)[:7])):
            (whole,) = await town.same(**(asked | {"prompt": kept}))
            (answer,) = await town.same(**asked, truncate_prompt_tokens=7, truncation_side=side)
            assert answer == whole
            assert answer["usage"]["prompt_tokens"] == 7

    context = Prompts("m", ByteTokens(), 512, 100)
    for most, kept in ((40, 60), (None, 99), (200, 1)):
        options = AnswerOptions(max_tokens=most, truncate_prompt_tokens=-1)
        assert context.truncated(prompt(300), options) == prompt(300)[-kept:]
    assert context.truncated(prompt(30), AnswerOptions(max_tokens=1, truncate_prompt_tokens=-1)) == prompt(30)


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.trio
async def test_the_usage_so_far_is_in_each_event(first: str, model: TorchModel) -> None:
    async with fronted(cluster(f"router.first_token={first}"), model) as town:
        options = {"include_usage": True, "continuous_usage_stats": True}
        asked = ASKED | {"max_tokens": 4, "temperature": 0, "stream": True}
        events = await town.same(**asked, stream_options=options)
        assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3, 4, 4]
        assert {event["usage"]["prompt_tokens"] for event in events} == {40}
        events = await town.same(**asked, stream_options=options | {"include_usage": False})
        assert not any("usage" in event for event in events)
        error = await refusal(town, **asked, stream_options=options, n=2)
        assert error["param"] == "stream_options"


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("dispatch", ["sequential", "concurrent"])
@pytest.mark.trio
async def test_an_answer_begins_with_the_prompt(first: str, dispatch: str, model: TorchModel) -> None:
    text = "Once upon a time"
    async with fronted(cluster(f"router.first_token={first}", f"router.dispatch={dispatch}"), model) as town:
        asked: dict[str, Any] = {"prompt": text, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        (plain,) = await town.same(**asked, max_tokens=6)
        for stream in (False, True):
            echoed = await town.same(**asked, max_tokens=6, echo=True, stream=stream)
            assert "".join(event["choices"][0]["text"] for event in echoed) == text + plain["choices"][0]["text"]
            assert tokens(echoed) == tokens([plain])
        stop = plain["choices"][0]["text"][:1]
        (stopped,) = await town.same(**asked, max_tokens=6, echo=True, stop=["Once", stop])
        assert stopped["choices"][0]["text"] == text, "stop strings are searched in the answer alone"
        (several,) = await town.ask(town.port, "/v1/completions", asked | {"echo": True, "n": 2, "max_tokens": 2})
        assert all(choice["text"].startswith(text) for choice in several["choices"])


@pytest.mark.parametrize("override", [*(f"router.first_token={first}" for first in KINDS), "transfer.method=kv-store"])
@pytest.mark.trio
async def test_a_prompt_is_scored_where_it_is_computed(override: str, model: TorchModel) -> None:
    """As lm-eval asks: no token or one, and the logprobs of the prompt's. D has no leg."""
    async with fronted(cluster(override), model) as town:
        asked: dict[str, Any] = {"prompt": prompt(300), "temperature": 0, "echo": True, "logprobs": 2}
        for stream in (False, True):
            (none,) = (await town.same(**asked, max_tokens=0, stream=stream, return_token_ids=True))[:1]
            (one,) = (await town.same(**asked, max_tokens=1, stream=stream))[:1]
            found = none["choices"][0]["logprobs"]
            assert none["choices"][0]["finish_reason"] == one["choices"][0]["finish_reason"] == "length"
            assert none["choices"][0]["text"] == model.prompts.decode(prompt(300))
            assert none["choices"][0]["token_ids"] == []
            assert len(found["tokens"]) == len(found["token_logprobs"]) == len(found["top_logprobs"]) == 300
            assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
            assert all(logprob < 0 for logprob in found["token_logprobs"][1:])
            assert one["choices"][0]["logprobs"]["token_logprobs"][:300] == found["token_logprobs"]
            assert len(one["choices"][0]["logprobs"]["tokens"]) == 301
        (whole,) = await town.same(**asked, max_tokens=0)
        assert whole["usage"] == {"prompt_tokens": 300, "completion_tokens": 0, "total_tokens": 300}
        assert town.home.d.engine.prompt_tokens_computed == 0
        # The logprob of an answer's token is that of the same token as a prompt's last one.
        (answer,) = await town.same(prompt=prompt(30), temperature=0, max_tokens=1, logprobs=1, return_token_ids=True)
        longer = {"prompt": [*prompt(30), *tokens([answer])], "echo": True, "logprobs": 1, "max_tokens": 0}
        (scored,) = await town.same(**longer)
        expected = answer["choices"][0]["logprobs"]["token_logprobs"][0]
        assert scored["choices"][0]["logprobs"]["token_logprobs"][-1] == pytest.approx(expected, abs=1e-5)
        # By this lm-eval knows that a continuation is the likeliest one; of its requests it leaves the last token out.
        (evaluated,) = await town.same(**(longer | {"max_tokens": 1, "temperature": 0, "seed": 1234}))
        found = evaluated["choices"][0]["logprobs"]
        assert found["token_logprobs"][30:-1] == [max(found["top_logprobs"][30].values())]
        several = await town.ask(
            town.port, "/v1/completions", asked | {"prompt": [prompt(9), prompt(12, 1)], "max_tokens": 0}
        )
        assert [len(choice["logprobs"]["tokens"]) for choice in several[0]["choices"]] == [9, 12]
        with trio.fail_after(10):
            while town.node.calls or town.node.legs:
                await trio.sleep(0.01)
        await town.home.quiet()


@pytest.mark.trio
async def test_tokens_that_the_model_has_not_are_named(model: TorchModel) -> None:
    async with fronted(cluster(), model) as town:
        for param, value in (("logit_bias", {"512": 1}), ("allowed_token_ids", [5, 512])):
            error = await refusal(town, prompt=[5], **{param: value})
            assert (error["param"], error["message"]) == (param, f"{param}: token ids must be below 512")


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.trio
async def test_synthetic_engines_take_the_same_requests(first: str) -> None:
    engines = [f"pool.{pool}.engine=synthetic" for pool in ("prefill", "decode")]
    scenario = cluster(f"router.first_token={first}", *engines)
    async with fronted(scenario, SyntheticModel(scenario, scenario.pools[0])) as town:
        asked = ASKED | {"max_tokens": 8, "temperature": 0}
        plain = tokens(await town.same(**asked))
        assert tokens(await town.same(**asked, frequency_penalty=2, presence_penalty=1, min_p=0.5)) == plain
        assert plain[0] not in tokens(await town.same(**asked, stop_token_ids=plain[:1], min_tokens=8))
        assert {*tokens(await town.same(**asked, allowed_token_ids=[3, 4]))} <= {3, 4}
        (scored,) = await town.same(**(asked | {"max_tokens": 0}), echo=True, logprobs=1)
        assert len(scored["choices"][0]["logprobs"]["tokens"]) == 40
