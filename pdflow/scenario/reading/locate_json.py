"""The line of each key in a JSON file, as `locate.py` has it of TOML: of a text that a reader has accepted."""

from __future__ import annotations

import json
import re
from typing import Final

from pdflow.scenario.reading.locate import KeyPath

_STRING: Final = r'"(?:[^"\\]|\\.)*"'
_TOKEN: Final = re.compile(rf"(?P<key>{_STRING})\s*:|{_STRING}|[{{}}\[\]]")


def json_key_lines(text: str) -> dict[KeyPath, int]:
    """Return the line (from 1) of every key that is in no array; of a key that an object has twice, the last one's."""
    lines: dict[KeyPath, int] = {}
    around: list[str | int] = []
    line, counted = 1, 0
    for match in _TOKEN.finditer(text):
        line, counted = line + text.count("\n", counted, match.start()), match.start()
        if match["key"] is not None:
            around[-1] = json.loads(match["key"])
            if 0 not in around:
                lines[tuple(around)] = line
        elif match[0] in "{[":
            around.append(0)
        elif match[0] in "}]":
            around.pop()
    return lines
