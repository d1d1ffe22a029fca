"""How tokens are chosen: by what is likely, by the seed and the place in the answer, by nothing else."""

from __future__ import annotations

import math
from collections import Counter

import pytest

torch = pytest.importorskip("torch", reason="logits are torch's: pip install 'pdflow[live]'")

from pdflow_runtime.engines.job import Sampling, TokenRequest  # noqa: E402
from pdflow_runtime.engines.sampling.draws import sample, uniform  # noqa: E402
from pdflow_runtime.engines.sampling.logprobs import Logprobs  # noqa: E402

PROBABILITIES = (0.05, 0.4, 0.15, 0.3, 0.1)
LOGITS = torch.tensor(PROBABILITIES).log()[None]


def drawn(count: int = 4000, **how: float) -> dict[int, float]:
    """How often each token comes, over the places of one answer."""
    sampling = Sampling(**({"temperature": 1.0, "seed": 3} | how))  # type: ignore[arg-type]
    token_requests = [TokenRequest(sampling, index) for index in range(count)]
    tokens = Counter(sampled.token for sampled in sample(LOGITS.expand(count, -1), token_requests))
    return {token: tokens[token] / count for token in sorted(tokens)}


def test_without_temperature_the_likeliest_comes() -> None:
    assert drawn(5, temperature=0.0) == {1: 1.0}
    assert drawn(50, top_k=1) == {1: 1.0}


def test_tokens_come_as_often_as_they_are_likely() -> None:
    # 4,000 draws: 0.03 are more than three standard deviations of the likeliest.
    assert drawn() == pytest.approx(dict(enumerate(PROBABILITIES)), abs=0.03)
    squares = [p * p for p in PROBABILITIES]
    cold = {token: square / sum(squares) for token, square in enumerate(squares)}
    assert drawn(temperature=0.5) == pytest.approx(cold, abs=0.03)


def test_of_the_likeliest_only_some_may_come() -> None:
    assert drawn(top_k=2) == pytest.approx({1: 4 / 7, 3: 3 / 7}, abs=0.03)
    # 0.4 + 0.3 reach 0.7; 0.71 takes a third.
    assert drawn(top_p=0.7) == pytest.approx({1: 4 / 7, 3: 3 / 7}, abs=0.03)
    assert set(drawn(top_p=0.71)) == {1, 2, 3}
    # Top-p is of what top-k has left.
    assert set(drawn(top_k=2, top_p=0.5)) == {1}
    assert set(drawn(top_p=1e-9)) == {1}


def test_a_token_depends_on_seed_and_position_and_not_on_the_batch() -> None:
    sampling = Sampling(temperature=0.8, seed=11)
    alone = [sample(LOGITS, [TokenRequest(sampling, index)])[0].token for index in range(40)]
    other = TokenRequest(Sampling(temperature=2.0, seed=5), 0)
    company = [
        sample(torch.cat((LOGITS.flip(1), LOGITS)), [other, TokenRequest(sampling, index)])[1].token
        for index in range(40)
    ]
    assert company == alone
    assert [
        sample(LOGITS, [TokenRequest(Sampling(temperature=0.8, seed=12), index)])[0].token for index in range(40)
    ] != alone


def test_draws_are_spread_evenly() -> None:
    draws = [uniform(seed, index) for seed in range(20) for index in range(500)]
    assert all(0 <= draw < 1 for draw in draws)
    tenths = Counter(int(draw * 10) for draw in draws)
    # 1,000 each, give or take 30.
    assert all(abs(count - 1000) < 150 for count in tenths.values())


def test_logprobs_are_the_models_own() -> None:
    token_request = TokenRequest(Sampling(temperature=0.1, top_k=1, logprobs=2), 0)
    (sampled,) = sample(LOGITS, [token_request])
    assert isinstance(sampled.logprobs, Logprobs)
    assert sampled.logprobs.chosen == pytest.approx(math.log(0.4))
    assert [token for token, _ in sampled.logprobs.top] == [1, 3]
    (none,) = sample(LOGITS, [TokenRequest(Sampling(logprobs=0), 0)])
    assert none.logprobs is not None
    assert none.logprobs.top == ()
