"""On which line of a JSON file a key stands, as `locate.py` says of TOML: of a text that a reader has accepted."""

from __future__ import annotations

import json
import re
from typing import Final

from pdflow.scenario.reading.locate import KeyPath

_STRING: Final = r'"(?:[^"\\]|\\.)*"'
_TOKEN: Final = re.compile(rf"(?P<key>{_STRING})\s*:|{_STRING}|[{{}}\[\]]")


def json_key_lines(text: str) -> dict[KeyPath, int]:
    """The line (from 1) of every key that no array is around, the last one's where an object says it twice."""
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
