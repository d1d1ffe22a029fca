"""The bound on the bytes of a token holds, and is unknown where text is dropped."""

from __future__ import annotations

import sys
import unicodedata
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("tokenizers", reason="tokenizer.json is read by tokenizers: pip install 'pdflow[live]'")

from tokenizers.pre_tokenizers import ByteLevel

from pdflow_runtime.engines.config import ModelError
from pdflow_runtime.engines.tokenizer import Tokenizer
from pdflow_runtime.router.token_bytes import BYTE_CHARACTERS, NFC_SHRINKS, TokenizerFile, bound_of, longest_token_bytes

LEVEL = {"type": "ByteLevel"}
BYTES = {piece: at for at, piece in enumerate(ByteLevel.alphabet())}
FALLBACK = {f"<0x{byte:02X}>": byte for byte in range(256)}


def bound(**fields: Any) -> int | None:
    model = {"type": "BPE", "vocab": {**BYTES, "Ġhello": 256}}
    return bound_of(msgspec.convert({"model": model, "pre_tokenizer": LEVEL, **fields}, TokenizerFile))


@given(text=st.text() | st.text("aeth ", min_size=100))
def test_a_text_has_as_many_tokens_as_its_bytes_say(tiny: Path, text: str) -> None:
    longest = longest_token_bytes(tiny / "tokenizer.json")
    assert longest is not None
    assert len(Tokenizer(tiny).encode(text, special=False)) >= len(text.encode()) / longest


def test_a_longer_token_is_counted_by_the_bytes_it_stands_for() -> None:
    assert frozenset(ByteLevel.alphabet()) == BYTE_CHARACTERS
    assert bound() == 6
    added = {"content": "<|a long one of 22 B|>", "lstrip": False}
    assert bound(added_tokens=[added]) == 22
    sentencepiece = {"type": "BPE", "byte_fallback": True, "vocab": {**FALLBACK, "▁▁▁": 300}}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    steps = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace]}
    assert bound(model=sentencepiece, pre_tokenizer=None, normalizer=steps) == 9


@pytest.mark.parametrize(
    "fields",
    [
        {"model": {"type": "WordPiece", "vocab": {"[UNK]": 0}}},
        {"model": {"type": "Unigram", "vocab": [["<unk>", 0.0]]}},
        {"model": {"type": "BPE", "vocab": {"a": 0}}},
        {"model": {"type": "BPE", "vocab": BYTES}, "pre_tokenizer": None},
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}},
        {"normalizer": {"type": "Replace", "pattern": {"String": "  "}, "content": " "}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [LEVEL, {"type": "Whitespace"}]}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Split", "behavior": "Removed"}, LEVEL]}},
        {"added_tokens": [{"content": "<m>", "lstrip": True}]},
        {"added_tokens": [{"content": "<m>", "rstrip": True}]},
        {"truncation": {"max_length": 512}},
    ],
)
def test_where_text_is_dropped_there_is_no_bound(fields: dict[str, Any]) -> None:
    assert bound(**fields) is None


def test_composition_shrinks_no_text_further_than_assumed() -> None:
    assert bound(normalizer={"type": "NFC"}) == 6 * NFC_SHRINKS
    worst = 0.0
    for code in range(sys.maxunicode + 1):
        if 0xD800 <= code < 0xE000:
            continue
        for form in ("NFD", "NFC"):
            text = unicodedata.normalize(form, chr(code))
            sources = {chr(code), text, unicodedata.normalize("NFD", text)}
            composed = len(unicodedata.normalize("NFC", text).encode())
            worst = max(worst, *(len(source.encode()) / composed for source in sources))
    assert worst <= NFC_SHRINKS


def test_a_file_that_is_none_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        longest_token_bytes(tmp_path / "tokenizer.json")
