"""Text that is told piece by piece: the pieces make the whole, broken characters and stop strings wait."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdflow_runtime.engines.detokenize import BROKEN, Detokenizer


class Bytes:
    """Tokens are pieces of bytes."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = pieces

    def decode(self, tokens: Sequence[int], /) -> str:
        return b"".join(self.pieces[token] for token in tokens).decode(errors="replace")


def detokenized(pieces: Sequence[bytes], **stops: object) -> list[str]:
    """What each piece lets out, and the end."""
    detokenizer = Detokenizer(Bytes(*pieces), **stops)  # type: ignore[arg-type]
    out = []
    for token in range(len(pieces)):
        out.append(detokenizer.push(token))
        if detokenizer.stopped is not None:
            break
    return [*out, detokenizer.flush()]


@given(st.lists(st.binary(max_size=6), max_size=60))
def test_the_pieces_make_the_whole(pieces: list[bytes]) -> None:
    assert "".join(detokenized(pieces)) == b"".join(pieces).decode(errors="replace")


@given(st.text(max_size=30), st.data())
def test_whole_characters_are_never_sent_broken(text: str, data: st.DataObject) -> None:
    whole = text.replace(BROKEN, "").encode()
    boundaries = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=20)))
    pieces = [whole[a:b] for a, b in zip([0, *boundaries], [*boundaries, len(whole)], strict=True)]
    out = detokenized(pieces)
    assert BROKEN not in "".join(out)
    assert out[-1] == ""


def test_a_character_waits_until_it_is_whole() -> None:
    assert detokenized([b"a", b"\xf0\x9f", b"\x98", b"\x80b"]) == ["a", "", "", "\U0001f600b", ""]
    assert detokenized([b"a\xe2\x82"]) == ["a", BROKEN]


@given(
    st.lists(st.sampled_from([b"a", b"b", b"ab", b"ba", b"\xc3", b"\xa4"]), max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_a_stop_string_ends_the_answer_before_any_of_it_is_sent(pieces: list[bytes], stop: list[str]) -> None:
    whole = b"".join(pieces).decode(errors="replace")
    ends = [whole.find(each) + len(each) for each in stop if each in whole]
    out = "".join(detokenized(pieces, stop=stop))
    if not ends:
        assert out == whole
        return
    # The one that is complete first; of two that end together, the longer.
    start = min(min(ends) - len(each) for each in stop if whole[: min(ends)].endswith(each))
    assert out == whole[:start]
    assert "".join(detokenized(pieces, stop=stop, include_stop=True)) == whole[: min(ends)]


def test_what_may_be_a_stop_string_waits() -> None:
    assert detokenized([b"x", b"S", b"T", b"A", b"STOP", b"y"], stop=["STOP"]) == ["x", "", "", "STA", "", ""]
    assert detokenized([b"ST"], stop=["STOP"]) == ["", "ST"]


@pytest.mark.parametrize("length", [1, 5, 200])
def test_an_answer_that_is_never_a_character_is_sent_all_the_same(length: int) -> None:
    out = detokenized([b"\x80"] * length)
    assert "".join(out) == BROKEN * length
