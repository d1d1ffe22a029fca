"""The names, labels and values that a PromQL expression mentions, without an evaluator."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

KEYWORDS = frozenset(("and", "or", "unless", "bool", "offset", "by", "without", "on", "ignoring", "group_left"))
GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
SELECTOR = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)\s*(?:\{([^}]*)\})?")
MATCHER = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)\s*(=~|!~|!=|=)\s*"((?:[^"\\]|\\.)*)"')
SCRAPED = frozenset(("instance", "job"))
"""Labels that Prometheus adds."""

Samples = dict[str, list[dict[str, str]]]
"""The labels of every sample, by its name."""


class Selector(NamedTuple):
    name: str
    matchers: list[tuple[str, str, str]]


def selectors(expr: str) -> Iterator[Selector]:
    """Every metric of an expression, with the matchers of its labels."""
    rest = re.sub(r"\[[^\]]*\]", "", GROUPING.sub("", expr))
    for found in SELECTOR.finditer(rest):
        name, labels = found.groups()
        follows = rest[found.end() :].lstrip()
        inside = rest[: found.start()].count("{") > rest[: found.start()].count("}")
        if inside or follows.startswith("(") or name in KEYWORDS or re.search(r"[0-9.$\"]$", rest[: found.start()]):
            continue
        yield Selector(name, MATCHER.findall(labels or ""))


def grouped(expr: str) -> set[str]:
    """The labels by which an expression groups or joins."""
    return {label.strip() for found in GROUPING.findall(expr) for label in found.split(",") if label.strip()} - SCRAPED


def problems(expr: str, samples: Samples) -> list[str]:
    """What an expression mentions and no sample has: names, labels, values of labels."""
    found = []
    labels: set[str] = set()
    for name, matchers in selectors(expr):
        if name == "up":  # Prometheus's own
            continue
        if name not in samples:
            found.append(f"{name} is not exported")
            continue
        labels.update(*samples[name])
        for label, operator, value in matchers:
            values = [sample[label] for sample in samples[name] if label in sample]
            if label in SCRAPED:
                continue
            if not values:
                found.append(f"{name} has no label {label}")
            for alternative in value.split("|") if operator in ("=", "=~") else ():
                if not any(re.fullmatch(alternative, each) for each in values):
                    found.append(f'{name} is never exported with {label}="{alternative}"')
    return found + [f"no metric of {expr!r} has the label {label}" for label in sorted(grouped(expr) - labels)]
