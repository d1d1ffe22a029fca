"""How a class of parameters is declared, read from JSON and written again.

A field says once which values it takes (a `Kind`) and what it means; the attrs validator, the reader, the writer and
the tables of docs/kv-transfer-params.md all use that. Names of fields are the originals' JSON names.

Keys that a class does not know are skipped: newer vLLM adds some, other connectors of a MultiConnector have theirs, and
vLLM skips them too. Only the object under "pdflow" is closed. Only pdflow writes it, and its values protect the data (a
lease word that is not read is a stale read), so an unknown key must not be ignored.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, Final, TypeVar

import attrs

from pdflow.methods.params.errors import ParamsError, quoted, shown
from pdflow.protocol.wire.checks import Problem

T = TypeVar("T")

MAX_KEYS: Final = 256
"""The most keys of one object, unknown ones included. vLLM's have a dozen."""

_SPEC: Final = "param"


def _same(value: Any) -> Any:
    return value


@attrs.frozen(kw_only=True)
class Kind:
    """The kind of values that a field takes. `freeze` makes JSON's value ours and never raises for what it does not
    know; `problem` says what is wrong with ours ("is 0"), `thaw` is the way back, `expected` what to send."""

    expected: str
    problem: Callable[[Any], Problem]
    freeze: Callable[[Any], Any] = _same
    thaw: Callable[[Any], Any] = _same


@attrs.frozen(kw_only=True)
class Spec:
    """The declaration of one field: the values that it takes, its meaning, and its presence in the JSON."""

    kind: Kind
    meaning: str
    required: bool
    """Has to be in the JSON, whatever a constructor's default is."""
    null: bool
    """Written as null when there is nothing to say, as the original does; otherwise left out."""

    @property
    def expected(self) -> str:
        return f"{self.kind.expected}: {self.meaning}"


def param(
    kind: Kind, meaning: str, *, default: Any = attrs.NOTHING, required: bool | None = None, null: bool = False
) -> Any:
    """Declare a field that takes values of `kind`, and None too if that is its default. Required unless it has a
    default."""
    must = default is attrs.NOTHING if required is None else required
    spec = Spec(kind=kind, meaning=meaning, required=must, null=null)

    def check(_instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value is None and default is None:
            return
        problem = kind.problem(value)
        if problem:
            raise ParamsError(attribute.name, problem, spec.expected)

    return attrs.field(default=default, validator=check, metadata={_SPEC: spec})


UNREAD: Final = Kind(expected="names", problem=lambda value: "" if isinstance(value, tuple) else f"is {shown(value)}")
"""The names of keys that a class of a configuration file does not read; no key of the file."""


def unread_keys(found: Mapping[Any, Any], into: type[Any]) -> tuple[str, ...]:
    """Return the keys of an object of a configuration file that a class does not read."""
    known = {field.name for field in attrs.fields(into) if spec_of(field).kind is not UNREAD}
    return tuple(key for key in found if isinstance(key, str) and key not in known)


def spec_of(field: attrs.Attribute[Any]) -> Spec:
    spec: Spec = field.metadata[_SPEC]
    return spec


@cache
def specs_of(params: type[Any]) -> tuple[tuple[str, Spec], ...]:
    """Return the fields of a class, by name, looked up once: a router reads and writes parameters for each request."""
    return tuple((field.name, spec_of(field)) for field in attrs.fields(params))


def structure(into: type[T], value: object, *, location: str = "kv_transfer_params", closed: bool = False) -> T:
    """Return `value`, which JSON gave, as an `into`. ParamsError for the first thing wrong."""
    found = mapping(value, location)
    specs = specs_of(into)  # type: ignore[arg-type]
    if closed:
        known = [name for name, _ in specs]
        for key in found:
            if key not in known:
                name = quoted(key) if isinstance(key, str) else shown(key)
                raise ParamsError(location, f"has the unknown key {name}", f"no keys but {', '.join(known)}")
    values = {}
    for name, spec in specs:
        if name in found:
            values[name] = spec.kind.freeze(found[name])
        elif spec.required:
            raise ParamsError(name, "is missing" + _instead(name, found, specs), spec.expected)
    return into(**values)


def plain(params: Any) -> dict[str, Any]:
    """Return `params` as a JSON object, keys in the order of its class."""
    written = {}
    for name, spec in specs_of(type(params)):  # type: ignore[arg-type]
        value = getattr(params, name)
        if spec.kind is UNREAD:
            continue
        if value is not None:
            written[name] = spec.kind.thaw(value)
        elif spec.null:
            written[name] = None
    return written


def mapping(value: object, location: str) -> Mapping[Any, Any]:
    """Return `value` if it is a JSON object of at most MAX_KEYS keys; otherwise raise ParamsError."""
    if not isinstance(value, Mapping):
        raise ParamsError(location, f"is {shown(value)}", "a JSON object")
    if len(value) > MAX_KEYS:
        raise ParamsError(location, f"has {len(value):,} keys", f"at most {MAX_KEYS}")
    return value


def nested(into: type[Any], location: str, expected: str) -> Kind:
    """Return the kind of a closed object inside another, read as `into`."""

    def freeze(value: object) -> object:
        if value is None or isinstance(value, into):
            return value
        try:
            return structure(into, value, location=location, closed=True)
        except ParamsError as error:
            raise (error if error.field == location else error.under(location)) from None

    def problem(value: object) -> Problem:
        return "" if isinstance(value, into) else f"is {shown(value)}"

    return Kind(expected=expected, problem=problem, freeze=freeze, thaw=plain)


def _instead(name: str, found: Mapping[Any, Any], specs: Iterable[tuple[str, Spec]]) -> str:
    """Return " (is X meant for it?)" if an unknown key is similar to the missing one; otherwise ""."""
    known = {known_name for known_name, _ in specs}
    unknown = [key for key in found if isinstance(key, str) and key not in known and len(key) <= 2 * len(name)]
    close = difflib.get_close_matches(name, sorted(unknown), n=1, cutoff=0.75)
    return f" (is {quoted(close[0])} meant for it?)" if close else ""
