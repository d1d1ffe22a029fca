"""What a request forbids or favours among the next tokens, and the logprobs of a prompt's own tokens."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.runtime.engines import support

torch = support.torch

from pdflow_runtime.engines.job import Sampling, TokenRequest  # noqa: E402
from pdflow_runtime.engines.model import Llama  # noqa: E402
from pdflow_runtime.engines.sampling.constraints import Constraints, History  # noqa: E402
from pdflow_runtime.engines.sampling.draws import sample  # noqa: E402
from pdflow_runtime.engines.sampling.logprobs import PromptScores  # noqa: E402
from tests.runtime.engines.support import Bench, dense_logits, load  # noqa: E402
from tests.runtime.support.live_pair import prompt  # noqa: E402

LOGITS = [2.0, 1.5, 1.0, 0.5, -1.0]
VOCAB = range(len(LOGITS))


def next_token(tokens: list[int], begins: int, endings: tuple[int, ...] = (), **rules: Any) -> int:
    """The likeliest token after `tokens`, of which those from `begins` on are the answer's."""
    sampling = Sampling(constraints=Constraints(**rules))
    history = History(tokens, begins, frozenset(endings))
    (sampled,) = sample(torch.tensor([LOGITS]), [TokenRequest(sampling, len(tokens) - begins, history)])
    return sampled.token


def order(tokens: list[int], begins: int, **rules: Any) -> list[int]:
    """All tokens from the likeliest down: each one is forbidden once it has come."""
    found: list[int] = []
    for count in VOCAB:
        allowed = tuple(token for token in VOCAB if token not in found)
        found.append(next_token(tokens, begins, allowed=allowed, **rules))
        assert len(found) == count + 1
    return found


def test_penalties_are_for_tokens_that_came() -> None:
    # 0 came twice and 1 once; 2 is in the prompt.
    tokens, begins = [2, 0, 1, 0], 1
    assert order(tokens, begins) == [0, 1, 2, 3, 4]
    # 2 - 2 * 0.6, 1.5 - 0.6, 1, 0.5, -1
    assert order(tokens, begins, frequency_penalty=0.6) == [2, 1, 0, 3, 4]
    # 2 - 1.2, 1.5 - 1.2, 1, 0.5, -1
    assert order(tokens, begins, presence_penalty=1.2) == [2, 0, 3, 1, 4]
    # 2 / 5, 1.5 / 5, 1 / 5, 0.5, -1: the prompt's tokens count
    assert order(tokens, begins, repetition_penalty=5.0) == [3, 0, 1, 2, 4]
    # what is unlikely is multiplied: -1 * 5
    assert order([4], 0, repetition_penalty=0.1) == [0, 1, 2, 3, 4]
    assert order([4], 0, repetition_penalty=0.1, logit_bias=((4, 5.9),)) == [4, 0, 1, 2, 3]
    assert order([], 0, frequency_penalty=2.0, presence_penalty=2.0) == [0, 1, 2, 3, 4]


def test_a_bias_is_added_and_only_allowed_tokens_come() -> None:
    assert order([], 0, logit_bias=((3, 1.25), (0, -100.0))) == [3, 1, 2, 4, 0]
    assert next_token([], 0, allowed=(4, 2)) == 2
    assert next_token([], 0, allowed=(4,), logit_bias=((4, -100.0),)) == 4


def test_rules_that_do_not_change_are_made_tensors_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of a whole vocabulary would take milliseconds for each token."""
    rules = Constraints(allowed=(4, 2, 3), logit_bias=((4, 4.0),), bad_words=((4, 4),))
    made: list[int] = []
    tensor = torch.tensor

    def counted(values: Any, **how: Any) -> Any:
        made.append(len(values))
        return tensor(values, **how)

    logits = torch.tensor([LOGITS])
    monkeypatch.setattr(torch, "tensor", counted)
    answer: list[int] = []
    for index in range(4):
        request = TokenRequest(Sampling(constraints=rules), index, History(answer, 0, frozenset()))
        answer.append(sample(logits, [request])[0].token)
    assert answer == [4, 2, 4, 2]
    assert made == [1, 1, 1, 1], "biased tokens and biases, then twice what may not follow 4"
    assert not rules.allows(0)
    assert not rules.allows(5)


def test_no_ending_comes_before_the_answer_is_long_enough() -> None:
    for length, expected in ((0, 2), (1, 2), (2, 0)):
        assert next_token([7] * 3 + [3] * length, 3, endings=(0, 1), min_tokens=2) == expected
    assert next_token([], 0, endings=(0, 2**31 - 1), min_tokens=2) == 1, "a stop token that the model has not"


def test_the_last_token_of_a_bad_word_may_not_follow_the_others() -> None:
    words = ((0,), (3, 4, 1))
    assert next_token([], 0, bad_words=words) == 1
    assert next_token([3, 4], 0, bad_words=words) == 2
    assert next_token([4, 4], 0, bad_words=words) == 1
    assert next_token([3, 4], 1, bad_words=words) == 1, "the prompt is no part of the answer"
    assert next_token([4], 0, bad_words=words) == 1


def test_where_nothing_is_left_some_token_comes() -> None:
    every = tuple((token,) for token in VOCAB)
    assert next_token([], 0, bad_words=every) == 0
    assert next_token([], 0, bad_words=every, allowed=(2, 3)) == 2
    assert next_token([], 0, endings=(3,), min_tokens=1, allowed=(3,)) == 3


def test_drawn_tokens_are_constrained_too_and_logprobs_are_the_models() -> None:
    sampling = Sampling(temperature=2.0, seed=4, logprobs=1, constraints=Constraints(allowed=(1, 4), min_tokens=1))
    requests = [TokenRequest(sampling, index, History([], 0, frozenset())) for index in range(200)]
    sampled = sample(torch.tensor([LOGITS]).expand(200, -1), requests)
    assert {each.token for each in sampled} == {1, 4}
    model = torch.tensor(LOGITS).log_softmax(-1)
    for each in sampled:
        assert each.logprobs is not None
        assert each.logprobs.chosen == pytest.approx(float(model[each.token]))
        assert [token for token, _ in each.logprobs.top] == [0]


def test_min_p_leaves_what_is_likely_enough() -> None:
    def drawn(**how: float) -> set[int]:
        sampling = Sampling(**({"temperature": 1.0, "seed": 9} | how))  # type: ignore[arg-type]
        requests = [TokenRequest(sampling, index) for index in range(2_000)]
        return {each.token for each in sample(torch.tensor([LOGITS]).expand(2_000, -1), requests)}

    # exp(-0.5) = 0.61 and exp(-1) = 0.37 of the likeliest
    assert drawn(min_p=0.6) == {0, 1}
    assert drawn(min_p=0.36) == {0, 1, 2}
    assert drawn(min_p=0.36, top_k=2) == {0, 1}
    assert drawn(min_p=1.0) == {0}
    # After temperature, as with vLLM.
    assert drawn(min_p=0.6, temperature=2.0) == {0, 1, 2}


def test_a_request_without_constraints_has_none() -> None:
    assert Sampling(constraints=Constraints()).constraints is None
    assert Sampling(constraints=Constraints()).is_plain
    for sampling in (
        Sampling(temperature=0.5),
        Sampling(logprobs=0),
        Sampling(constraints=Constraints(frequency_penalty=1.0)),
    ):
        assert not sampling.is_plain


@pytest.fixture(scope="module")
def llama(tiny: Path) -> Llama:
    return load(tiny)


@pytest.mark.trio
async def test_a_preempted_sequence_and_one_in_company_are_constrained_alike(llama: Llama) -> None:
    """As many tokens as there are blocks for: some sequences are computed again, with the answer so far."""
    rules = Constraints(frequency_penalty=0.7, repetition_penalty=1.2, min_tokens=30)
    sampling = Sampling(ignore_eos=True, constraints=rules)

    async def answers(blocks: int, together: bool) -> tuple[list[list[int]], int]:
        bench = Bench(llama, blocks=blocks, block_size=4, max_num_seqs=4, max_num_batched_tokens=64)
        found: list[list[int]] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bench.engine.run)
            asked = []
            for number in range(4):
                asked.append(bench.ask(prompt(9, number), 30, sampling))
                if not together:
                    found.append(await bench.answer(asked[-1]))
            if together:
                found = [await bench.answer(seq) for seq in asked]
            nursery.cancel_scope.cancel()
        return found, bench.engine.preemptions

    alone, _ = await answers(40, together=False)
    crowded, preemptions = await answers(24, together=True)
    assert preemptions > 0
    assert crowded == alone


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.trio
async def test_the_logprobs_of_a_prompt_are_those_of_a_dense_pass(llama: Llama, caching: bool) -> None:
    """In chunks; and of a prompt whose blocks are remembered, too, as its sequence then shares none."""
    tokens = prompt(150)
    expected = dense_logits(llama.config, llama.weights, tokens).log_softmax(-1)
    bench = Bench(llama, caching=caching, max_num_seqs=8, max_num_batched_tokens=48)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.engine.run)
        await bench.answer(bench.ask(tokens, 2))
        scores = PromptScores(tokens, 3)
        seq = bench.ask(tokens, 2, scores=scores)
        await bench.answer(seq)
        nursery.cancel_scope.cancel()
    first, *others = scores.logprobs
    assert first is None
    for position, (logprobs, token) in enumerate(zip(others, tokens[1:], strict=True)):
        assert logprobs is not None
        assert logprobs.chosen == pytest.approx(float(expected[position, token]), abs=1e-3)
        values = expected[position].topk(3).values.tolist()
        assert [value for _, value in logprobs.top] == pytest.approx(values, abs=1e-3)
    assert math.isfinite(sum(logprobs.chosen for logprobs in others if logprobs is not None))
