"""What is heard of an answer, however its bytes are cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdflow_runtime.bench.answer import LONGEST_REASON, AnswerReader, BrokenAnswerError, refusal
from pdflow_runtime.http.errors import OpenAIError
from pdflow_runtime.http.openai.answers import DONE, AnswerPiece, ChatAnswer, CompletionAnswer, error_event, usage

COMPLETION = CompletionAnswer("x", 0, "m")
USAGE = COMPLETION.usage_event(usage(5, 3))
THREE = b"".join(
    COMPLETION.event(AnswerPiece(0, text, ending)) for text, ending in (("a", None), ("é", None), ("", "stop"))
)


def read_answer(*pieces: bytes) -> AnswerReader:
    """Each piece a nanosecond after the one before."""
    answer = AnswerReader()
    for now, piece in enumerate(pieces):
        answer.feed(piece, now)
    return answer


@given(st.lists(st.integers(0, len(THREE + USAGE + DONE)), max_size=8).map(sorted))
def test_bytes_may_be_split_anywhere(boundaries: list[int]) -> None:
    whole = THREE + USAGE + DONE
    offsets = [0, *boundaries, len(whole)]
    answer = read_answer(*(whole[a:b] for a, b in pairwise(offsets)))
    answer.end()
    assert ("".join(answer.pieces), len(answer.times), answer.output_tokens, answer.prompt_tokens) == ("aé", 3, 3, 5)
    assert answer.times == sorted(answer.times)


def test_each_event_is_a_token_and_the_servers_count_goes_first() -> None:
    two = COMPLETION.event(AnswerPiece(0, "a b")), COMPLETION.event(AnswerPiece(0, " c", "length"))
    assert read_answer(*two).output_tokens == 2
    answer = read_answer(*two, USAGE)
    assert (answer.output_tokens, answer.times) == (3, [0, 1])


def test_tokens_of_one_event_have_one_time() -> None:
    answer = read_answer(
        COMPLETION.event(AnswerPiece(0, "a", token_ids=[4])),
        COMPLETION.event(AnswerPiece(0, "bcd", "length", token_ids=[5, 6, 7])),
    )
    assert answer.times == [0, 1, 1, 1]
    assert answer.token_ids == [4, 5, 6, 7]


def test_the_event_that_opens_a_chat_is_no_token() -> None:
    role, text = ChatAnswer("x", 0, "m").event(AnswerPiece(0, "hi", "stop")).split(b"\n\n")[:2]
    answer = read_answer(role + b"\n\n", text + b"\n\n")
    assert answer.times == [1]


def test_other_lines_and_line_ends_mean_nothing() -> None:
    assert read_answer(b": ping\r\n\r\nevent: x\r\n" + THREE.replace(b"\n", b"\r\n") + DONE).done


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"", "without a token"),
        (USAGE + DONE, "without a token"),
        (COMPLETION.event(AnswerPiece(0, "a")), "cut off"),
        (THREE + COMPLETION.usage_event(usage(5, 0)) + DONE, "reports no token"),
        (THREE + error_event(OpenAIError(502, "the request failed: peer_dead")), "the request failed: peer_dead"),
        (b'data: {"error": "all is lost"}\n\n', "all is lost"),
        (b"data: {\n\n", "not in OpenAI's format"),
        (b'data: {"choices": [{"text": 1}]}\n\n', "not in OpenAI's format"),
        (b"data: \xff\n\n", "not in OpenAI's format"),
        (b"data: " + b"[" * 100_000 + b"\n\n", "not in OpenAI's format"),
    ],
)
def test_an_invalid_answer_is_explained(answer: bytes, message: str) -> None:
    with pytest.raises(BrokenAnswerError, match=message):
        read_answer(answer).end()


def test_an_error_is_quoted_as_one_short_line() -> None:
    assert refusal(404, OpenAIError(404, "no such\nmodel").body()) == "HTTP 404: no such model"
    assert refusal(500, b"<html>\x1b[31moh") == "HTTP 500: <html>\N{REPLACEMENT CHARACTER}[31moh"
    assert refusal(502, b"") == "HTTP 502"
    assert len(refusal(500, b"x" * 10_000)) == len("HTTP 500: ") + LONGEST_REASON


@given(st.binary())
def test_any_bytes_are_refused_in_one_line(data: bytes) -> None:
    with pytest.raises(BrokenAnswerError, match=r"\A.*\Z"):
        read_answer(b"data:" + data + b"\n").end()
