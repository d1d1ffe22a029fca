"""The line of each key in a TOML file.

tomllib gives values without lines. This scanner gives lines without values: it walks a text that tomllib has already
accepted, so it need not validate, only keep count. It knows tables, arrays of tables, dotted and quoted keys, inline
tables and arrays over several lines. Source: the TOML 1.0 grammar.
"""

from __future__ import annotations

import re
import tomllib
from typing import Final, TypeAlias

KeyPath: TypeAlias = tuple[str | int, ...]
"""A path in the document: table keys, and indices into arrays."""

_BLANK: Final = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_SPACE: Final = re.compile(r"[ \t]*")
_BARE_KEY: Final = re.compile(r"[A-Za-z0-9_-]+")
_STRING: Final = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}' r"|'''.*?'{3,5}" r'|"(?:[^"\\\n]|\\.)*"' r"|'[^'\n]*'",
    re.DOTALL,
)
_SCALAR: Final = re.compile(r"[^\s,\]}#]+(?: [0-9][^\s,\]}#]*)?")


def key_lines(text: str) -> dict[KeyPath, int]:
    """Return the line (from 1) of every table, key and array element of a valid TOML text."""
    scanner = _Scanner(text)
    scanner.document()
    return scanner.lines


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.line = 1
        self.lines: dict[KeyPath, int] = {}
        self._array_lengths: dict[KeyPath, int] = {}

    def document(self) -> None:
        """Scan statements to the end of the text; a header sets the table that the next ones belong to."""
        table: KeyPath = ()
        self._skip(_BLANK)
        while self.position < len(self.text):
            if self.text.startswith("[[", self.position):
                table = self._array_header()
            elif self.text.startswith("[", self.position):
                table = self._header()
            else:
                self._pair(table)
            self._skip(_BLANK)

    def _header(self) -> KeyPath:
        self.position += 1
        path = self._enter(self._key())
        self.position += 1
        return path

    def _array_header(self) -> KeyPath:
        self.position += 2
        key = self._key()
        self.position += 2
        array = (*self._enter(key[:-1]), key[-1])
        index = self._array_lengths.get(array, 0)
        self._array_lengths[array] = index + 1
        self.lines.setdefault(array, self.line)
        self.lines[(*array, index)] = self.line
        return (*array, index)

    def _enter(self, key: KeyPath) -> KeyPath:
        """Return a header's key as a path: a name of an array of tables means its last element. A table that only this
        header implies is on its line."""
        path: KeyPath = ()
        for segment in key:
            path = (*path, segment)
            self.lines.setdefault(path, self.line)
            if path in self._array_lengths:
                path = (*path, self._array_lengths[path] - 1)
        return path

    def _pair(self, table: KeyPath) -> None:
        line = self.line
        key = self._key()
        for end in range(1, len(key) + 1):
            self.lines.setdefault((*table, *key[:end]), line)
        self.position += 1  # the sign =
        self._skip(_SPACE)
        self._value((*table, *key))

    def _key(self) -> KeyPath:
        segments: list[str] = []
        while True:
            self._skip(_SPACE)
            segments.append(self._key_segment())
            self._skip(_SPACE)
            if not self.text.startswith(".", self.position):
                return tuple(segments)
            self.position += 1

    def _key_segment(self) -> str:
        if self.text[self.position] in "\"'":
            quoted = self._skip(_STRING)
            return str(tomllib.loads(f"key = {quoted}")["key"])
        return self._skip(_BARE_KEY)

    def _value(self, path: KeyPath) -> None:
        self.lines.setdefault(path, self.line)
        opening = self.text[self.position]
        if opening == "[":
            self._elements(path, "]")
        elif opening == "{":
            self._elements(path, "}")
        elif opening in "\"'":
            self._skip(_STRING)
        else:
            self._skip(_SCALAR)

    def _elements(self, path: KeyPath, closing: str) -> None:
        """Scan the elements between brackets or braces, with commas between and blanks anywhere."""
        self.position += 1
        index = 0
        self._skip(_BLANK)
        while self.text[self.position] != closing:
            if closing == "}":
                self._pair(path)
            else:
                self._value((*path, index))
            index += 1
            self._skip(_BLANK)
            if self.text[self.position] == ",":
                self.position += 1
                self._skip(_BLANK)
        self.position += 1

    def _skip(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self.text, self.position)
        if match is None:
            raise ValueError(f"line {self.line}: this text is not TOML, which tomllib should have said")
        self.position = match.end()
        self.line += match.group().count("\n")
        return match.group()
