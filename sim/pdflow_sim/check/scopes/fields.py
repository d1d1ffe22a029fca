"""Scopes from named values: those of a counterexample file, and those of `pdflow check scope --set FIELD=VALUE`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs

from pdflow.errors import Problem, ScenarioError
from pdflow.protocol.dialect import DIALECTS, Dialect
from pdflow.scenario.reading.convert import did_you_mean, one_of, shown
from pdflow_sim.check.moves.compose import relation
from pdflow_sim.check.scopes.scope import ENDLESS, Scope, allowed_text

FIELDS: dict[str, attrs.Attribute[Any]] = {field.name: field for field in attrs.fields(Scope)}
EXPECTED = {bool: "true or false", int: "a whole number", str: "text"}


class ScopeFieldError(ValueError):
    """A value that does not fit its field. `field` is empty where several fields exclude each other."""

    def __init__(self, field: str, what: str) -> None:
        super().__init__(what)
        self.field = field
        self.what = what


def scope_of(values: Mapping[str, Any]) -> Scope:
    """Return the scope with these values; other fields keep their defaults. Raises ScopeFieldError."""
    given = {name: _checked(name, value) for name, value in values.items()}
    try:
        scope = Scope(**given)
        relation(scope)
    except ValueError as error:
        raise ScopeFieldError("", str(error.args[0] if error.args else error)) from None
    return scope


def scope_from_text(settings: Iterable[str], dialect: str | None = None) -> Scope:
    """Return the scope of the options `--set FIELD=VALUE` and `--dialect`. Raises ScenarioError with all problems."""
    values: dict[str, Any] = {} if dialect is None else {"dialect": dialect}
    problems = []
    for text in settings:
        name, equals, value = (each.strip() for each in text.partition("="))
        try:
            if not equals:
                raise ScopeFieldError(name, "expected FIELD=VALUE")
            values[name] = _parsed(name, value)
            _checked(name, values[name])
        except ScopeFieldError as error:
            problems.append(Problem(f"--set {text}", "", error.what))
    if problems:
        raise ScenarioError(problems)
    try:
        return scope_of(values)
    except ScopeFieldError as error:
        raise ScenarioError([Problem("--set", "", error.what)]) from None


def described(scope: Scope) -> str:
    """Return the fields in which a scope differs from the default one, such as "drop=1 chunks=2"."""
    return " ".join(_differences(scope)) or "all fields at their defaults"


def _differences(scope: Scope) -> Iterator[str]:
    for name, field in FIELDS.items():
        value = getattr(scope, name)
        if value != field.default:
            yield f"{name}={_text(value)}"


def field_rows() -> list[dict[str, Any]]:
    """Return a row for each field: its name, default, allowed values and meaning."""
    return [
        {"field": name, "default": _text(field.default), "values": _values(field), "meaning": field.metadata["help"]}
        for name, field in FIELDS.items()
    ]


def _values(field: attrs.Attribute[Any]) -> str:
    if isinstance(field.default, Dialect):
        return allowed_text(DIALECTS)
    allowed = field.metadata["allowed"]
    return EXPECTED[type(field.default)] if allowed is None else allowed_text(allowed)


def _text(value: Any) -> str:
    return value.name if isinstance(value, Dialect) else str(value).lower() if isinstance(value, bool) else str(value)


def _field(name: str) -> attrs.Attribute[Any]:
    if name not in FIELDS:
        hint = did_you_mean(name, FIELDS) or "; `pdflow check scope --list` lists the fields"
        raise ScopeFieldError(name, f"unknown field{hint}")
    return FIELDS[name]


def _parsed(name: str, text: str) -> Any:
    """Return the value that a text has for this field, or the text itself if it has none. Raises ScopeFieldError."""
    kind: type[Any] = type(_field(name).default)
    if kind is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    if kind is int and text.removeprefix("-").isdecimal():
        return int(text)
    return text


def _checked(name: str, value: Any) -> Any:
    """Return a value as Scope takes it. Raises ScopeFieldError."""
    field = _field(name)
    if isinstance(field.default, Dialect):
        if not isinstance(value, str) or value not in DIALECTS:
            raise ScopeFieldError(name, str(one_of(value, DIALECTS)))
        return DIALECTS[value]
    if type(value) is not type(field.default):
        raise ScopeFieldError(name, f"is {shown(value)}, expected {EXPECTED[type(field.default)]}")
    if type(value) is int and value > ENDLESS:
        raise ScopeFieldError(name, f"is {value}, more than {ENDLESS}")
    allowed = field.metadata["allowed"]
    if allowed is not None and value not in allowed:
        known = [str(each) for each in allowed if each] if isinstance(value, str) else []
        hint = did_you_mean(str(value), known)
        raise ScopeFieldError(name, f"is {shown(value)}, expected {allowed_text(allowed)}{hint}")
    return value
