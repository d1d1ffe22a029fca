"""Workload models: requests like those of a published trace, drawn from figures about it.

Decides how figures become requests. The figures are in models/*.toml, each with its source, computed by
benchmarks/fit_workload.py; no row of a trace is kept. What is modelled:

- arrivals: a Poisson process whose rate is a product of levels on different scales of time, with batches;
- lengths: quantiles of the prompt, and of the answer given the prompt's group (as many groups of equal weight as the
  figures have), so that their dependence is kept;
- conversations, where the trace shows them: some requests come back after a while with the earlier prompt, its answer
  and new text in front of the model again, and so share whole prefix blocks with it. A few come back edited and share
  only the beginning. Every prompt starts with the same `common_blocks`.

Where the length of a conversation's first prompt decides strongly whether it returns, that is kept by group, too.

What is not: more than one reply to the same turn (1 % in the trace), and lengths that drift with the time of day. A run
starts with no conversation open, as a trace does that is cut out of the middle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush

import attrs

from pdflow.protocol.values import S
from pdflow.workload.arrivals import RateLevel, modulated
from pdflow.workload.lengths import Quantiles
from pdflow.workload.request import PREFIX_BLOCK_TOKENS, Request
from pdflow.workload.rng import Rng


@attrs.frozen
class Lengths:
    """Prompt lengths, and answer lengths by group of the prompt's quantile: group k of n is from k/n to (k + 1)/n."""

    input_tokens: Quantiles
    output_tokens: tuple[Quantiles, ...]


@attrs.frozen
class Conversations:
    """The figures of conversations: when requests return, and with which tokens."""

    common_blocks: int
    """Leading prefix blocks that all prompts share."""
    returns_after_first: tuple[float, ...]
    """Probability that a conversation's first request is followed by another one, by group of its prompt's quantile;
    one group, if it does not depend on that."""
    returns_after_later: float
    """The same probability for its later requests, whatever their length."""
    after_s: Quantiles
    """Time from one request of a conversation to the next."""
    edited: float
    """Share of returning requests that do not begin with the whole earlier prompt."""
    kept: Quantiles
    """The share of the earlier prompt's blocks that an edited request keeps."""
    edited_tokens: Quantiles
    """Tokens of an edited request after the kept blocks."""
    added_tokens: Quantiles
    """Tokens of the others beyond the earlier prompt and its answer. Negative where the answer was shortened."""
    output_tokens: tuple[Quantiles, ...]
    """Answers to returning requests, by group of `added_tokens`' quantile."""


@attrs.frozen
class WorkloadModel:
    """The figures of one workload."""

    name: str
    source: str
    rate_rps: float
    levels: tuple[RateLevel, ...]
    batch_probability: float
    batch_gap_s: Quantiles
    step_ns: int
    lengths: Lengths
    longest_input_tokens: int
    conversations: Conversations | None

    def requests(self, seed: int, rate_rps: float | None = None) -> Iterator[Request]:
        """Draw requests without end, at the trace's rate or another. Bursts and pauses keep their length in s."""
        rng = Rng(seed)
        arrivals = modulated(
            self.rate_rps if rate_rps is None else rate_rps,
            self.levels,
            self.batch_probability,
            self.batch_gap_s,
            self.step_ns,
            rng,
        )
        if self.conversations is None:
            return self._independent(arrivals, rng)
        return self._conversing(arrivals, self.conversations, rng)

    def _independent(self, arrivals: Iterator[int], rng: Rng) -> Iterator[Request]:
        prompt, answers = self.lengths.input_tokens.at, [group.at for group in self.lengths.output_tokens]
        of_input, of_output = rng.stream("input").uniform, rng.stream("output").uniform
        groups = len(answers)
        for index, at in enumerate(arrivals):
            u = of_input()
            yield Request(index, at, int(prompt(u)), int(answers[int(u * groups)](of_output())))

    def _conversing(self, arrivals: Iterator[int], talk: Conversations, rng: Rng) -> Iterator[Request]:
        """Yield requests: an arrival continues the conversation that is due and waited longest, or else begins one. So
        the arrivals are the process's own, and a conversation returns at the first arrival after its pause."""
        prompt, answers = self.lengths.input_tokens.at, self.lengths.output_tokens
        of_input, of_output = rng.stream("input").uniform, rng.stream("output").uniform
        of_return, first_returns = rng.stream("returns").uniform, talk.returns_after_first
        common, fresh_id = tuple(range(talk.common_blocks)), talk.common_blocks
        pausing: list[tuple[int, int, Request]] = []  # (until, order, last request)
        for index, at in enumerate(arrivals):
            if pausing and pausing[0][0] <= at:
                _, _, last = heappop(pausing)
                shared, tokens, output = self._continued(last, talk, of_input(), of_output(), of_return)
                returns = talk.returns_after_later
            else:
                u = of_input()
                shared, tokens = common, int(prompt(u))
                output = int(_group(answers, u).at(of_output()))
                returns = first_returns[int(u * len(first_returns))]
            blocks = -(-tokens // PREFIX_BLOCK_TOKENS)
            kept = min(len(shared), blocks)
            prefix = (*shared[:kept], *range(fresh_id, fresh_id + blocks - kept))
            fresh_id += blocks - kept
            request = Request(index, at, tokens, output, prefix)
            if of_return() < returns:
                heappush(pausing, (at + int(talk.after_s.at(of_return()) * S), index, request))
            yield request

    def _continued(
        self, last: Request, talk: Conversations, u: float, v: float, of_return: Callable[[], float]
    ) -> tuple[tuple[int, ...], int, int]:
        """Return the prefix shared with the conversation's last request, the new prompt's length and its answer's."""
        output = int(_group(talk.output_tokens, u).at(v))
        whole = last.input_tokens // PREFIX_BLOCK_TOKENS
        if of_return() < talk.edited:
            left = max(talk.common_blocks, min(whole, int(talk.kept.at(of_return()) * len(last.prefix))))
            tokens = left * PREFIX_BLOCK_TOKENS + int(talk.edited_tokens.at(u))
        else:
            left = whole
            tokens = last.input_tokens + last.output_tokens + int(talk.added_tokens.at(u))
        tokens = min(self.longest_input_tokens, max(tokens, left * PREFIX_BLOCK_TOKENS, 1))
        return last.prefix[:left], tokens, output


def _group(groups: Sequence[Quantiles], u: float) -> Quantiles:
    return groups[int(u * len(groups))]
