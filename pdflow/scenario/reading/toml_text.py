"""A document as TOML text, which tomllib reads back as the same document.

Tables of the top level have headers, pools and faults one each; whatever lies deeper stands inline, as in the examples.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

_BARE_KEY: Final = re.compile(r"[A-Za-z0-9_-]+")


def toml_text(document: Mapping[str, Any]) -> str:
    """Return the whole text: first the keys that belong to no table, then table by table."""
    loose = {key: value for key, value in document.items() if not _has_headers(value)}
    sections = ["".join(_lines(loose))] if loose else []
    for key, value in document.items():
        if isinstance(value, Mapping):
            sections.append(f"[{_key(key)}]\n" + "".join(_lines(value)))
        elif _has_headers(value):
            sections += [f"[[{_key(key)}]]\n" + "".join(_lines(table)) for table in value]
    return "\n".join(sections)


def _has_headers(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(isinstance(item, Mapping) for item in value)
    return isinstance(value, Mapping)


def _lines(table: Mapping[str, Any]) -> Iterator[str]:
    for key, value in table.items():
        yield f"{_key(key)} = {_value(value)}\n"


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _text(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        inside = ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items())
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    return _text(value) if isinstance(value, str) else str(value)


def _text(text: str) -> str:
    """Quote a text as TOML: JSON's escapes are TOML's, except that TOML wants DEL escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
