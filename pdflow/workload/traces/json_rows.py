"""JSON traces: Mooncake's lines, and the datasets of vLLM's benchmark, which are texts.

Sources: Mooncake, kvcache-ai/Mooncake FAST25-release/traces (`timestamp` in ms, `input_length`, `output_length`,
`hash_ids`: one id for each 512 tokens of the prompt, the last block partly filled). ShareGPT and custom, vLLM
benchmarks/datasets.py: of a conversation the first turn is the prompt and the second the answer, those with fewer turns
are passed over; a line of a custom dataset has a `prompt` and `output_tokens`.

Of texts only the lengths matter to a simulation; a live run sends them. An entry that says its lengths (LENGTH_KEYS) is
taken at its word; else they are estimated as characters / `characters_per_token`, rounded up: 4 is the usual figure for
English prose, code and Chinese have fewer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Final, TypeAlias

import msgspec

from pdflow.protocol.values import MS
from pdflow.workload.request import PREFIX_BLOCK_TOKENS, Row
from pdflow.workload.traces.complaints import Complaints
from pdflow.workload.traces.csv_rows import CLASS, CLASS_EXPECTED

_Count = Annotated[int, msgspec.Meta(ge=0, le=999_999_999)]
_Hash = Annotated[int, msgspec.Meta(ge=0)]
MOST_TOKENS: Final = 999_999_999


class _MooncakeLine(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0, le=4e12)]  # ms, since 1970 if need be; ns stay in 62 bits
    input_length: _Count
    output_length: _Count
    hash_ids: tuple[_Hash, ...] = ()
    class_: str = msgspec.field(default="", name="class")


_decode_mooncake = msgspec.json.Decoder(_MooncakeLine).decode

_MOONCAKE_EXPECTED = (
    'expected {"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [one per 512 tokens]}'
)


def mooncake_rows(lines: Iterable[str], location: str) -> Iterator[Row]:
    """Yield the rows of Mooncake's JSON lines, which may have a `class` besides."""
    complaints, latest = Complaints(location), None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = _decode_mooncake(line)
        except (msgspec.DecodeError, UnicodeError) as error:
            complaints.add(number, f"{plain(str(error))}; {_MOONCAKE_EXPECTED}")
            continue
        at = round(row.timestamp * MS)
        blocks = -(-max(1, row.input_length) // PREFIX_BLOCK_TOKENS)
        if latest is not None and at < latest:
            complaints.add(
                number, f"timestamp {row.timestamp:g} is earlier than the line above, expected times in order"
            )
        elif len(row.hash_ids) > blocks:
            complaints.add(
                number,
                f"{len(row.hash_ids)} hash_ids for {row.input_length} tokens, expected at most {blocks}, "
                f"one for each {PREFIX_BLOCK_TOKENS}",
            )
        elif row.class_ and not CLASS(row.class_):
            complaints.add(number, f"class: {CLASS_EXPECTED}")
        else:
            latest = at
            yield at, row.input_length, row.output_length, row.hash_ids, row.class_
    if latest is None and not complaints.problems:
        complaints.add(1, f"the trace is empty, {_MOONCAKE_EXPECTED}")
    complaints.raise_any()


_FIELD = re.compile(r" - at `\$\.(\w+)[^`]*`$")


def plain(message: str) -> str:
    """Rephrase msgspec's message: the field first, and no capital but in a name."""
    field = _FIELD.search(message)
    what = message[: field.start()] if field else message
    if not what.startswith("JSON"):
        what = what[:1].lower() + what[1:]
    return f"{field[1]}: {what}" if field else what


LENGTH_KEYS: Final = (
    ("prompt_len", "output_len"),
    ("input_tokens", "output_tokens"),
    ("prompt_tokens", "completion_tokens"),
    ("input_length", "output_length"),
)
_SHAREGPT_EXPECTED = 'expected an array of {"conversations": [{"value": "prompt"}, {"value": "answer"}, ...]}'
_CUSTOM_EXPECTED = 'expected {"prompt": "text", "output_tokens": tokens}'


Text: TypeAlias = tuple[int, int, str | None]
"""Input and output tokens, and the prompt, if it is there."""


def untimed_rows(texts: Iterable[Text]) -> Iterator[Row]:
    """Yield the rows of texts, without times: the lengths that a simulation needs."""
    return ((0, prompt, answer, (), "") for prompt, answer, _ in texts)


def sharegpt_texts(pieces: Iterable[str], location: str, characters_per_token: float) -> Iterator[Text]:
    """Yield the texts of conversations, in a JSON array or one after the other. `pieces` may end anywhere, even in the
    middle of a word."""
    complaints, some = Complaints(location), False
    for line, entry in _values(pieces, complaints):
        turns = entry.get("conversations") if isinstance(entry, dict) else None
        lengths = _explicit_lengths(entry)
        first_turns = turns[:2] if isinstance(turns, list) else ()
        texts = [turn.get("value") if isinstance(turn, dict) else None for turn in first_turns]
        if lengths is None and isinstance(turns, list):
            if len(turns) < 2:
                continue
            if all(isinstance(text, str) for text in texts):
                prompt, answer = (_tokens(str(text), characters_per_token) for text in texts)
                lengths = prompt, answer
        if lengths is None:
            complaints.add(line, f"an entry is not a conversation, {_SHAREGPT_EXPECTED}")
            continue
        some = True
        yield *lengths, texts[0] if texts and isinstance(texts[0], str) else None
    if not some and not complaints.problems:
        complaints.add(1, f"no conversation has two turns, {_SHAREGPT_EXPECTED}")
    complaints.raise_any()


def custom_texts(lines: Iterable[str], location: str, characters_per_token: float) -> Iterator[Text]:
    """Yield the texts of vLLM's custom dataset, one a line."""
    complaints, some = Complaints(location), False
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            complaints.add(number, f"{plain(str(error))}; {_CUSTOM_EXPECTED}")
            continue
        lengths = _explicit_lengths(entry)
        prompt, answer = (entry.get("prompt"), entry.get("output_tokens")) if isinstance(entry, dict) else (None, None)
        if lengths is None and isinstance(prompt, str) and isinstance(answer, int) and _is_count(answer):
            lengths = _tokens(prompt, characters_per_token), answer
        if lengths is None:
            complaints.add(number, _CUSTOM_EXPECTED)
            continue
        some = True
        yield *lengths, prompt if isinstance(prompt, str) else None
    if not some and not complaints.problems:
        complaints.add(1, f"the trace is empty, {_CUSTOM_EXPECTED}")
    complaints.raise_any()


def _explicit_lengths(entry: Any) -> tuple[int, int] | None:
    if isinstance(entry, dict):
        for prompt, answer in LENGTH_KEYS:
            if _is_count(entry.get(prompt)) and _is_count(entry.get(answer)):
                return entry[prompt], entry[answer]
    return None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_TOKENS


def _tokens(text: str, characters_per_token: float) -> int:
    return min(MOST_TOKENS, -int(-len(text) // characters_per_token))


LONGEST_ENTRY: Final = 1 << 24
"""Characters of one entry; beyond it a bracket is missing somewhere."""
_BETWEEN = re.compile(r"[\s,\[\]]*")
_NEAR_END: Final = 16
"""An error this near to the end of what has been read may be a word that was cut in two."""


def _values(pieces: Iterable[str], complaints: Complaints) -> Iterator[tuple[int, Any]]:
    """Yield JSON values one after the other, with the line that each begins on; the brackets of an array around them
    and the commas between them are skipped. Holds one value and a piece of text at a time."""
    decode = json.JSONDecoder().raw_decode
    source = iter(pieces)
    text, at, line, enough, ended = "", 0, 1, 1, False
    while True:
        start = _BETWEEN.match(text, at)
        assert start is not None
        line += text.count("\n", at, start.end())
        at = start.end()
        if len(text) - at < enough and not ended:
            more = [text[at:]]
            size = len(more[0])
            while size < enough and not ended:
                piece = next(source, None)
                ended = piece is None
                more.append((piece or "").removeprefix("\ufeff") if line == 1 and not size else piece or "")
                size += len(more[-1])
            text, at = "".join(more), 0
            continue
        if at == len(text):
            return
        try:
            value, end = decode(text, at)
        except RecursionError:
            raise complaints.refuse(line, "an entry is nested too deeply") from None
        except json.JSONDecodeError as error:
            truncated = error.msg.startswith("Unterminated") or error.pos >= len(text) - _NEAR_END
            if ended or not truncated:
                raise complaints.refuse(line + text.count("\n", at, error.pos), f"is not JSON: {error.msg}") from None
            if len(text) - at > LONGEST_ENTRY:
                raise complaints.refuse(line, f"an entry has no end after {LONGEST_ENTRY:,} characters") from None
            enough = 2 * (len(text) - at)
            continue
        yield line, value
        line += text.count("\n", at, end)
        at, enough = end, 1
