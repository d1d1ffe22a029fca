"""The most bytes of text that one token of a tokenizer can stand for. A text of B bytes has at least B / (that many)
tokens, which refuses a prompt that is far too long before anything of it is tokenized.

The bound holds only where no text is dropped. So it is known for byte-level BPE and for BPE with a fallback to bytes
(Llama, Mistral, Qwen), and unknown for tokenizers that strip or drop text, or have one token for all unknown text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from pdflow_runtime.engines.config import ModelError

NFC_SHRINKS: Final = 3
"""Composition (NFC) makes at most 3 bytes of text 1: three letters of a Hangul syllable, of 3 bytes each, become one
character of 3 bytes (a test looks at every composition of Unicode)."""
PRINTABLE: Final = (range(0x21, 0x7F), range(0xA1, 0xAD), range(0xAE, 0x100))
"""Bytes that byte-level pieces spell as the character of that code."""
BYTE_CHARACTERS: Final = frozenset(chr(byte) for bytes_ in PRINTABLE for byte in bytes_) | frozenset(
    chr(256 + number) for number in range(256 - sum(map(len, PRINTABLE)))
)
"""The characters that byte-level pieces spell bytes with (GPT-2's bytes_to_unicode)."""

FALLBACK: Final = frozenset(f"<0x{byte:02X}>" for byte in range(256))
"""The pieces of BPE's fallback to bytes."""


class _AddedToken(msgspec.Struct):
    content: str
    lstrip: bool = False
    rstrip: bool = False


class _Model(msgspec.Struct):
    type: str | None = None
    vocab: Any = None
    byte_fallback: bool | None = None


class TokenizerFile(msgspec.Struct):
    """The fields of tokenizer.json that decide the bound."""

    model: _Model
    added_tokens: list[_AddedToken] = []
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    truncation: dict[str, Any] | None = None


def longest_token_bytes(path: Path) -> int | None:
    """Return the most bytes of text that one token can stand for, by a tokenizer.json; None if it has no such bound.
    ModelError if the file is none."""
    try:
        return bound_of(msgspec.json.decode(path.read_bytes(), type=TokenizerFile))
    except (msgspec.DecodeError, UnicodeDecodeError, OSError) as error:
        raise ModelError(f"{path}: {error}") from None


def bound_of(found: TokenizerFile) -> int | None:
    model, steps = found.model, _steps(found.pre_tokenizer)
    normalizers = _steps(found.normalizer)
    vocab = model.vocab
    if found.truncation is not None or model.type not in (None, "BPE") or not isinstance(vocab, dict):
        return None
    if any(token.lstrip or token.rstrip for token in found.added_tokens):
        return None
    shrinks = 1
    for step in normalizers:
        factor = _shrinks(step)
        if factor is None:
            return None
        shrinks *= factor
    if not all(_keeps_all(step) for step in steps):
        return None
    byte_level = any(step.get("type") == "ByteLevel" for step in (*steps, *normalizers))
    needed = BYTE_CHARACTERS if byte_level else FALLBACK
    if not (byte_level or model.byte_fallback) or any(piece not in vocab for piece in needed):
        return None
    # A character of a byte-level piece stands for one byte; other pieces are text.
    of_model = max(map(len, vocab)) if byte_level else max(len(piece.encode()) for piece in vocab)
    return max(of_model * shrinks, *(len(token.content.encode()) * shrinks for token in found.added_tokens), 1)


def _steps(step: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer, which may be a sequence of others."""
    if step is None:
        return []
    if step.get("type") != "Sequence":
        return [step]
    nested = step.get("normalizers") or step.get("pretokenizers") or []
    return [inner for each in nested for inner in _steps(each)]


def _shrinks(step: dict[str, Any]) -> int | None:
    """Return how many bytes this normalizer may make one; None if any number."""
    match step:
        case {"type": "NFC"}:
            return NFC_SHRINKS
        case {"type": "Prepend" | "ByteLevel"}:
            return 1
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if len(new) >= len(old):
            return 1 if len(new.encode()) >= len(old.encode()) else None
        case _:
            return None


def _keeps_all(step: dict[str, Any]) -> bool:
    """True if this pre-tokenizer drops no text."""
    match step:
        case {"type": "ByteLevel" | "Metaspace" | "Digits"}:
            return True
        case {"type": "Split" | "Punctuation", "behavior": str(behavior)}:
            return behavior != "Removed"
        case _:
            return False
