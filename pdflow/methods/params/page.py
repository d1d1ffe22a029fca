"""The tables of docs/kv-transfer-params.md, from the classes themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import attrs

from pdflow.methods.params.config import CONNECTORS, EXTRA, KvTransferConfig
from pdflow.methods.params.errors import shown
from pdflow.methods.params.extras import EXTRAS, Extras
from pdflow.methods.params.fields import UNREAD, spec_of
from pdflow.methods.params.mooncake_json import PipeFile, StoreFile, StoreV0File
from pdflow.methods.params.parse import PARAMS

LEGS: Final = ("to P", "to D")


def requests() -> Iterator[str]:
    """Yield one table for each method and leg; methods and legs with the same parameters share one."""
    methods_by_kinds: dict[tuple[type, ...], list[str]] = {}
    for method, legs in PARAMS.items():
        methods_by_kinds.setdefault(tuple(legs.values()), []).append(method)
    for kinds, methods in methods_by_kinds.items():
        yield f"### {', '.join(f'`{method}`' for method in methods)}\n"
        for kind in dict.fromkeys(kinds):
            sent = " and ".join(to for to, of in zip(LEGS, kinds, strict=True) if of is kind)
            fields = [field for field in attrs.fields(kind) if spec_of(field).kind is not EXTRAS]
            yield sent[0].upper() + sent[1:] + (":\n" if fields else ": nothing.\n")
            yield from table(fields)


def extras() -> Iterator[str]:
    yield from table(attrs.fields(Extras))


def config() -> Iterator[str]:
    """Yield the table of the outer object, then those of what each connector reads inside."""
    yield from table(field for field in attrs.fields(KvTransferConfig) if field.name != EXTRA)
    for kind in dict.fromkeys(kind for kinds in CONNECTORS.values() for kind in kinds):
        yield f"### {_title(kind)}\n"
        yield from table(attrs.fields(kind))


def files() -> Iterator[str]:
    for kind in (PipeFile, StoreV0File, StoreFile):
        yield f"### {_title(kind)}\n"
        yield from table(attrs.fields(kind))


TABLES: Final = {"requests": requests, "extras": extras, "config": config, "files": files}


def regenerated(document: str) -> str:
    """Return the document with everything between `<!-- NAME -->` and `<!-- /NAME -->` written anew."""
    for name, lines in TABLES.items():
        head, begin, rest = document.partition(f"<!-- {name} -->\n")
        _, end, tail = rest.partition(f"<!-- /{name} -->")
        if not begin or not end:
            raise ValueError(f"docs/kv-transfer-params.md has no section marked {name}")
        document = "".join((head, begin, "\n".join(lines()), end, tail))
    return document


def table(fields: Iterable[attrs.Attribute[Any]]) -> Iterator[str]:
    """Yield a table with a row for each field; nothing if there are none."""
    rows = [
        f"| `{field.name}` | {_cell(spec_of(field).kind.expected)} | {_default(field)} | {_meaning(field)} |"
        for field in fields
        if spec_of(field).kind is not UNREAD
    ]
    if rows:
        yield "\n".join(("| key | value | if absent | meaning |", "| --- | --- | --- | --- |", *rows, ""))


def _default(field: attrs.Attribute[Any]) -> str:
    if spec_of(field).required:
        return "refused"
    if field.default is None:
        return "null" if spec_of(field).null else "none"
    value = field.default
    return f"`{list(value) if isinstance(value, tuple) else shown(value)}`".replace("'", '"')


def _meaning(field: attrs.Attribute[Any]) -> str:
    return _cell(spec_of(field).meaning)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _title(kind: type) -> str:
    return " ".join((kind.__doc__ or "").split()).rstrip(".")
