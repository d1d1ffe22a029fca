"""The tokens of answers that pass, counted without parsing them: however the pieces are split, whatever the engine
reports."""

from __future__ import annotations

import pytest

from pdflow_runtime.http.openai.answers import DONE, AnswerPiece, ChatAnswer, CompletionAnswer, Usage, usage
from pdflow_runtime.observe.passing_answers import PassingAnswer, TokenIntervals

MS = 1_000_000
TOKENS = 6


def events(form: type[CompletionAnswer] | type[ChatAnswer], used: Usage | None = None) -> list[bytes]:
    """An answer of six tokens whose text looks like the ends of events."""
    answer = form("1", 0, "tiny")
    text = '\n\ndata: [DONE]\n"completion_tokens":9,"finish_reason":"stop"'
    pieces = [AnswerPiece(0, text) for _ in range(TOKENS - 1)] + [AnswerPiece(0, text, "length")]
    last = b"" if used is None else answer.usage_event(used)
    return [*(answer.event(piece) for piece in pieces), last + DONE]


@pytest.mark.parametrize("form", [CompletionAnswer, ChatAnswer])
@pytest.mark.parametrize("used", [None, usage(3, TOKENS)])
def test_each_token_counts_once(form: type[CompletionAnswer] | type[ChatAnswer], used: Usage | None) -> None:
    whole = events(form, used)
    for pieces in (whole, [b"".join(whole)], [*whole[:-2], whole[-2] + whole[-1]], [whole[0] + whole[1], *whole[2:]]):
        intervals = TokenIntervals()
        answer = PassingAnswer(intervals)
        for piece in pieces:
            answer.add([b"%x\r\n%b\r\n" % (len(piece), piece)], [0])
            assert answer.tokens_so_far <= TOKENS
        assert answer.ended(chat=form is ChatAnswer) == (TOKENS, "length")
        assert sum(intervals.counts) <= TOKENS - 1


@pytest.mark.parametrize("together", [1, 2, 7])
def test_times_between_tokens(together: int) -> None:
    """The end of the stream is no token, whether it comes with the last one or behind it."""
    whole = events(CompletionAnswer)
    times = [at * MS for at in (1000, 1020, 1060, 1061, 1062, 1462, 1463)]
    intervals = TokenIntervals()
    answer = PassingAnswer(intervals)
    for at in range(0, len(whole), together):
        answer.add(whole[at : at + together], times[at : at + together])
    answer.ended()
    # 20, 40, 1, 1 and 400 ms.
    assert dict(intervals.buckets()) | {"0.01": 2, "0.025": 3, "0.05": 4, "0.4": 5, "+Inf": 5} == dict(
        intervals.buckets()
    )
    assert intervals.sum_ns == 462 * MS
    intervals = TokenIntervals()
    answer = PassingAnswer(intervals)
    answer.add([whole[0], whole[1] + whole[2], b"".join(whole[3:])], [at * MS for at in (2000, 2020, 2050)])
    answer.ended()
    assert sum(intervals.counts) == TOKENS - 1
    assert intervals.sum_ns == 50 * MS


def test_the_first_token_may_be_ps() -> None:
    intervals = TokenIntervals()
    answer = PassingAnswer(intervals)
    answer.first_token_sent(100 * MS)
    answer.add(events(CompletionAnswer)[-2:], [130 * MS, 131 * MS])
    assert answer.ended() == (2, "length")
    assert (sum(intervals.counts), intervals.sum_ns) == (1, 30 * MS)


def test_an_answer_that_is_not_streamed_reports_its_tokens() -> None:
    intervals = TokenIntervals()
    answer = PassingAnswer(intervals)
    whole = CompletionAnswer("1", 0, "tiny").whole([AnswerPiece(0, "x\n\n", "stop")], usage(3, 40))
    pieces = [whole[at : at + 50] for at in range(0, len(whole), 50)]
    answer.add(pieces, [0] * len(pieces))
    assert answer.ended() == (40, "stop")
    assert sum(intervals.counts) == 0


def test_what_broke_off_counts_as_far_as_it_came() -> None:
    answer = PassingAnswer(TokenIntervals())
    answer.add(events(CompletionAnswer)[:3], [0] * 3)
    assert answer.ended() == (3, "")
    # Engines whose events have several tokens name their ids.
    assert answer.ended(known_tokens=9) == (9, "")
