"""HTML as text that is always escaped: whatever is not `Html` already is escaped where it is inserted."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

_UNSPEAKABLE: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
"""Characters that no page may have, or that cannot be encoded: a scenario's name or a command line may have them."""


class Html(str):
    """Markup."""

    __slots__ = ()


def joined(fragments: Iterable[str]) -> Html:
    """Join texts and markup, escaping the texts."""
    return Html("".join(fragment if isinstance(fragment, Html) else _escaped(fragment) for fragment in fragments))


def tag(name: str, *inside: str, **attributes: str | float) -> Html:
    """Return an element; `class_` is its class, and `stroke_width` its stroke-width."""
    rendered = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_attribute_value(value)}"' for key, value in attributes.items()
    )
    return Html(f"<{name}{rendered}>{joined(inside)}</{name}>")


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], text_columns: int = 1) -> Html:
    """Return a table that scrolls where it does not fit. The first `text_columns` columns are text, others figures."""
    kinds = ["word" if index < text_columns else "figure" for index in range(len(heads))]
    head = joined(tag("th", text, class_=kind, scope="col") for text, kind in zip(heads, kinds, strict=True))
    body = joined(
        tag("tr", *(tag("td", text, class_=kind) for text, kind in zip(row, kinds, strict=True))) for row in rows
    )
    return tag("div", tag("table", tag("thead", tag("tr", head)), tag("tbody", body)), class_="scroll")


def bar(begin: float, end: float) -> Html:
    """Return a bar from one share of a cell's width to another; its figure is printed beside it."""
    left, width = 100 * max(0.0, begin), 100 * (min(1.0, end) - max(0.0, begin))
    inner = tag("i", style=f"margin-left:{left:.2f}%;width:{width:.2f}%") if width > 0 else Html()
    return tag("span", inner, class_="bar", aria_hidden="true")


def _escaped(text: str) -> str:
    return escape(_UNSPEAKABLE.sub("\ufffd", text))


def _attribute_value(value: str | float) -> str:
    return _escaped(value) if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")
