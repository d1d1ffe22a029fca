"""What a client has received is read back from the pieces of its stream, wherever these begin and end."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdflow_runtime.http.openai.answers import AnswerPiece, ChatAnswer, CompletionAnswer
from pdflow_runtime.router.passed import MOST_BYTES, REDUCE_BYTES, PassedAnswer

TEXT = st.text(max_size=20) | st.sampled_from(['"token_ids":[7]', '"finish_reason":"stop"', "data: ", "\n\n"])


@given(
    answers=st.lists(st.tuples(TEXT, st.lists(st.integers(0, 2**31 - 1), max_size=3)), max_size=60),
    chat=st.booleans(),
    splits=st.lists(st.integers(0, 2**16), max_size=30),
)
def test_the_token_ids_are_those_of_the_events(
    answers: list[tuple[str, list[int]]], chat: bool, splits: list[int]
) -> None:
    form = (ChatAnswer if chat else CompletionAnswer)("r5.1", 1_764_250_000, "tiny")
    data = b""
    for text, tokens in answers:
        event = form.event(AnswerPiece(0, text, token_ids=tokens, prompt_token_ids=[1, 2, 3]))
        data += b"%x\r\n%b\r\n" % (len(event), event)
    at = sorted({split % (len(data) + 1) for split in splits} | {0, len(data)})
    passed = PassedAnswer()
    for begin, end in itertools.pairwise(at):
        passed.add(data[begin:end])
    assert passed.tokens == [token for _, tokens in answers for token in tokens]
    assert not passed.finished
    given_tokens = passed.given()
    if passed.tokens:
        assert given_tokens is not None
        assert (given_tokens.tokens, given_tokens.id, given_tokens.created) == (len(passed.tokens), *form.name)
    else:
        assert given_tokens is None


@pytest.mark.parametrize("tokens", [1, 10_000])
def test_a_first_token_of_p_counts(tokens: int) -> None:
    form = CompletionAnswer("r5.2", 3, "tiny")
    passed = PassedAnswer()
    passed.begin(9, "cmpl-r5.1", 2)
    for _ in range(tokens):
        passed.add(form.event(AnswerPiece(0, " a", token_ids=[4])))
    assert sum(map(len, passed._pieces)) <= 2 * REDUCE_BYTES
    assert passed.tokens == [9] + [4] * tokens
    found = passed.given()
    assert found is not None
    assert (found.tokens, found.id, found.created) == (tokens + 1, "cmpl-r5.1", 2)


def test_a_last_event_is_noticed() -> None:
    passed = PassedAnswer()
    passed.add(CompletionAnswer("r5.2", 3, "tiny").event(AnswerPiece(0, " a", "length", token_ids=[4])))
    assert passed.given() is not None
    assert passed.finished


def test_an_incomplete_event_cannot_be_continued() -> None:
    """An upstream may put the end of an event into the next chunk."""
    event = CompletionAnswer("r5.2", 3, "tiny").event(AnswerPiece(0, " a", token_ids=[4]))
    for at in range(1, len(event) - 1):
        passed = PassedAnswer()
        for piece in (event, event[:at]):
            passed.add(b"%x\r\n%b\r\n" % (len(piece), piece))
        assert passed.given() is None, event[:at]
        rest = event[at:]
        passed.add(b"%x\r\n%b\r\n" % (len(rest), rest))
        assert passed.tokens == [4, 4]
        assert passed.given() is not None


def test_a_long_event_is_kept_up_to_a_bound_and_not_copied_for_each_piece() -> None:
    passed = PassedAnswer()
    passed.add(CompletionAnswer("r5.2", 3, "tiny").event(AnswerPiece(0, " a", token_ids=[4])))
    piece = b"x" * 1000
    most = 0
    for _ in range(2 * MOST_BYTES // len(piece)):
        passed.add(piece)
        most = max(most, sum(map(len, passed._pieces)))
    assert most <= 2 * MOST_BYTES + len(piece)
    assert passed.given() is None
