"""Conversion of plain TOML values to the classes of the schema, with every error at once.

cattrs does the walking and collects; the hooks here decide what a value must be (no number from a text, no integer
from 8.0 or true) and say what was expected. A problem is a path and a sentence; where that path stands in a file is
`locate.py`'s business.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from types import UnionType
from typing import Any, Final, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import attrs
from cattrs import (
    AttributeValidationNote,
    BaseValidationError,
    ClassValidationError,
    Converter,
    ForbiddenExtraKeysError,
    IterableValidationNote,
)
from cattrs.gen import make_dict_structure_fn, make_mapping_structure_fn, override

from pdflow.scenario.reading.locate import KeyPath
from pdflow.scenario.schema import distributions, faults
from pdflow.scenario.schema import scenario as schema
from pdflow.scenario.schema import workload as workload_schema
from pdflow.scenario.schema.fields import Bound, WholeOrAuto, key_of

T = TypeVar("T")

_MISSING: Final = "is missing"
_PREFIX_LETTERS: Final = 3
"""The letters of a name that are enough to suggest every name that begins with them."""
_SUGGESTED: Final = 3
"""The most names that are suggested together."""


@attrs.frozen
class Complaint:
    """A problem at one path of the document; `unknown` means a key that does not exist, which affects nothing else."""

    path: KeyPath
    message: str
    unknown: bool = False
    meant: KeyPath | None = None
    """The path of the key that an unknown one was probably meant to be: that it is missing needs no complaint."""


class MisfitError(ValueError):
    """A value that a hook refuses; `at` leads from the value to the part that is wrong."""

    def __init__(self, message: str, at: KeyPath = ()) -> None:
        super().__init__(message)
        self.at = at


@attrs.frozen
class Tagged:
    """A table of several kinds, told apart by one key; a bare number may stand for one kind's only key."""

    tag: str
    kinds: Mapping[str, type]
    bare: str | None = None


TAGGED: Final[Mapping[Any, Tagged]] = {
    workload_schema.Arrival: Tagged(
        "process",
        {
            "poisson": workload_schema.PoissonArrival,
            "gamma": workload_schema.GammaArrival,
            "constant": workload_schema.ConstantArrival,
            "ramp": workload_schema.RampArrival,
            "diurnal": workload_schema.DiurnalArrival,
            "closed": workload_schema.ClosedArrival,
        },
    ),
    distributions.Length: Tagged(
        "dist",
        {
            "fixed": distributions.FixedLength,
            "uniform": distributions.UniformLength,
            "lognormal": distributions.LognormalLength,
            "empirical": distributions.EmpiricalLength,
        },
        bare="fixed",
    ),
    distributions.Time: Tagged(
        "dist",
        {
            "fixed": distributions.FixedTime,
            "uniform": distributions.UniformTime,
            "exponential": distributions.ExponentialTime,
            "lognormal": distributions.LognormalTime,
        },
        bare="fixed",
    ),
    distributions.Turns: Tagged(
        "dist",
        {
            "fixed": distributions.FixedTurns,
            "uniform": distributions.UniformTurns,
            "geometric": distributions.GeometricTurns,
            "empirical": distributions.EmpiricalTurns,
        },
        bare="fixed",
    ),
    schema.Cost: Tagged("model", schema.COST_KINDS),
    faults.Fault: Tagged("kind", faults.FAULT_KINDS),
}


def structure(value: object, into: type[T]) -> tuple[T | None, list[Complaint]]:
    """Return `value` as an `into`, and everything wrong with it; None if more is wrong than keys that do not exist."""
    try:
        return _CONVERTER.structure(value, into), []
    except (BaseValidationError, MisfitError) as error:
        found = _once(_complaints(error, ()))
    unknown = [complaint.path for complaint in found if complaint.unknown]
    if len(unknown) < len(found):
        return None, found
    try:
        return _CONVERTER.structure(_without(value, unknown), into), found
    except (BaseValidationError, MisfitError) as error:
        # Only now, without the keys that nobody knows, was the class built and had something to say.
        return None, _once([*found, *_complaints(error, ())])


def _once(complaints: Iterable[Complaint]) -> list[Complaint]:
    """Return the complaints without those about a missing key that another one says is written wrongly."""
    found = list(complaints)
    meant = {complaint.meant for complaint in found}
    return [complaint for complaint in found if complaint.message != _MISSING or complaint.path not in meant]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean X?)", or "" where no known name is close.

    Names that begin with what was written come before names that only look alike: "h100-s" is nearer to "h100-sxm" than
    to "h100". Case does not matter.
    """
    near = _near(name, known)
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that was probably meant; None where none is close."""
    return next(iter(_near(name, known)), None)


def _near(name: str, known: Iterable[str]) -> list[str]:
    """Return the known names to suggest for this one, the nearest first."""
    names = {each.lower(): each for each in sorted(known)}
    written = name.lower()
    begun = [each for each in names if each.startswith(written)] if len(written) >= _PREFIX_LETTERS else []
    if begun:
        close = difflib.get_close_matches(written, begun, n=_SUGGESTED, cutoff=0)
    else:
        close = difflib.get_close_matches(written, list(names), n=1)
    return [names[each] for each in close]


def one_of(value: object, known: Iterable[str]) -> MisfitError:
    """Return the error for a name that is not among those known."""
    names = list(known)
    hint = did_you_mean(value, names) if isinstance(value, str) else ""
    return MisfitError(f"is {shown(value)}, expected one of {', '.join(names)}{hint}")


def shown(value: object) -> str:
    """Return a value as its author wrote it, shortened."""
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, (list, tuple)):
        return "an array"
    if isinstance(value, bool):
        return "true" if value else "false"
    text = f'"{value}"' if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _complaints(error: BaseException, path: KeyPath) -> Iterable[Complaint]:
    """Walk cattrs' tree of errors; the notes on each name the attribute or index that it belongs to."""
    if isinstance(error, ForbiddenExtraKeysError):
        known = [key_of(field) for field in attrs.fields(error.cl)] if attrs.has(error.cl) else []
        for key in sorted(error.extra_fields):
            hint = did_you_mean(key, known) or (f", expected one of {', '.join(known)}" if known else "")
            likely = nearest(key, known)
            meant = None if likely is None else (*path, likely)
            yield Complaint((*path, key), "unknown key" + hint, unknown=True, meant=meant)
    elif isinstance(error, BaseValidationError):
        for inner in error.exceptions:
            yield from _complaints(inner, path + _step(error, inner))
    elif isinstance(error, KeyError):
        yield Complaint(path, _MISSING)
    elif isinstance(error, MisfitError):
        yield Complaint((*path, *error.at), str(error))
    elif isinstance(error, ValueError):
        yield Complaint(path, str(error))
    else:
        raise error


def _step(parent: BaseValidationError, error: BaseException) -> KeyPath:
    for note in getattr(error, "__notes__", ()):
        if isinstance(note, IterableValidationNote):
            return (note.index,)
        if isinstance(note, AttributeValidationNote) and isinstance(parent, ClassValidationError):
            return (key_of(getattr(attrs.fields(parent.cl), note.name)),)
    return ()


def _without(value: Any, paths: list[KeyPath]) -> Any:
    """Return a copy of a document value that lacks the keys at `paths`."""
    if isinstance(value, dict):
        kept = {key: inner for key, inner in value.items() if (key,) not in paths}
        return {key: _without(inner, [p[1:] for p in paths if p[0] == key]) for key, inner in kept.items()}
    if isinstance(value, list):
        return [_without(inner, [p[1:] for p in paths if p[0] == index]) for index, inner in enumerate(value)]
    return value


def _whole(value: object, _type: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        as_integer = isinstance(value, float) and value.is_integer() and abs(value) < 1e15
        hint = f" (write {int(value)})" if as_integer and isinstance(value, float) else ""
        raise MisfitError(f"is {shown(value)}, expected an integer{hint}")
    if abs(value) >= 1 << 63:
        raise MisfitError(f"is {shown(value)}, expected an integer of at most 64 bits")
    return value


def _real(value: object, _type: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise MisfitError(f"is {shown(value)}, expected a number")
    try:
        return float(value)
    except OverflowError:
        raise MisfitError(f"is {shown(value)}, expected a number within the range of a double") from None


def _text(value: object, _type: object) -> str:
    if not isinstance(value, str):
        raise MisfitError(f"is {shown(value)}, expected a string in quotes")
    return value


def _truth(value: object, _type: object) -> bool:
    if not isinstance(value, bool):
        raise MisfitError(f"is {shown(value)}, expected true or false")
    return value


def _rate(value: object, _type: object) -> int | None:
    number = _real(value, float)
    if number == math.inf:
        return None
    if not math.isfinite(number):
        raise MisfitError(f"is {shown(value)}, expected bytes per second of at least 1, or inf")
    return value if isinstance(value, int) else int(number)


def _literal(value: object, literal: Any) -> Any:
    if isinstance(value, str) and value in get_args(literal):
        return value
    raise one_of(value, get_args(literal))


def _whole_or_auto(value: object, _type: object) -> int | str:
    if value == "auto":
        return "auto"
    if isinstance(value, str):
        raise MisfitError(f'is {shown(value)}, expected an integer or "auto"')
    return _whole(value, int)


def _tuple(value: object, into: Any) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise MisfitError(f"is {shown(value)}, expected an array")
    element: Any = get_args(into)[0]
    return tuple(_CONVERTER.structure(list(value), list[element]))


def _tables(into: Any) -> Any:
    """Return a hook for tables by name, whose values are all of one kind."""
    from_mapping: Any = make_mapping_structure_fn(into, _CONVERTER, detailed_validation=True)

    def hook(value: object, _type: object) -> Any:
        if not isinstance(value, Mapping):
            raise MisfitError(f"is {shown(value)}, expected a table")
        return from_mapping(value, into)

    return hook


def _tagged(value: object, union: Any) -> Any:
    tagged = TAGGED[union]
    if tagged.bare is not None and not isinstance(value, Mapping):
        return _bare(value, tagged.kinds[tagged.bare])
    if not isinstance(value, Mapping):
        raise MisfitError(f"is {shown(value)}, expected a table with the key {tagged.tag}")
    if tagged.tag not in value:
        of_any_kind = {key_of(field) for kind in tagged.kinds.values() for field in attrs.fields(kind)}
        for key in value:
            if key not in of_any_kind and tagged.tag in _near(key, {*of_any_kind, tagged.tag}):
                raise MisfitError(f"unknown key (did you mean {tagged.tag}?)", at=(key,))
        raise MisfitError(f"is missing, expected one of {', '.join(tagged.kinds)}", at=(tagged.tag,))
    name = value[tagged.tag]
    if not isinstance(name, str) or name not in tagged.kinds:
        raise MisfitError(str(one_of(name, tagged.kinds)), at=(tagged.tag,))
    rest = {key: inner for key, inner in value.items() if key != tagged.tag}
    return _CONVERTER.structure(rest, tagged.kinds[name])


def _bare(value: object, kind: Any) -> Any:
    """Read a bare number as the only key of this kind."""
    (only,) = attrs.fields(kind)
    return kind(**{only.name: _bounded(only, get_type_hints(kind)[only.name])(value, None)})


def _bounded(field: attrs.Attribute[Any], inner: Any) -> Any:
    """Return a hook for one field: structure the value, then check it against the field's bound or attrs validator."""
    bound: Bound | None = field.metadata.get("bound")

    def hook(value: object, _type: object) -> Any:
        result = _rate(value, None) if field.metadata.get("rate") else _CONVERTER.structure(value, inner)
        if bound is not None and result is not None and not bound.holds(result):
            raise MisfitError(f"is {shown(value)}, expected {bound.expected()}")
        if field.validator is not None:
            try:
                field.validator(None, field, result)
            except ValueError as error:
                raise MisfitError(f"is {shown(value)}, expected {_after_must_be(error)}") from None
        if isinstance(result, float) and not math.isfinite(result):
            raise MisfitError(f"is {shown(value)}, expected a finite number")
        return result

    return hook


def _after_must_be(error: ValueError) -> str:
    """Return the condition alone of attrs' message "'ec' must be <= 1.0: 2.0"."""
    return "a number " + str(error).partition(" must be ")[2].rpartition(":")[0]


def _class_hook(cls: type) -> Any:
    """Return the hook that makes a table an attrs class: renamed keys, bounds, no key that the class does not have."""
    hints = get_type_hints(cls)
    overrides = {
        field.name: override(rename=key_of(field), struct_hook=_bounded(field, _not_none(hints[field.name])))
        for field in attrs.fields(cls)
    }
    from_table: Any = make_dict_structure_fn(
        cls,
        _CONVERTER,
        _cattrs_forbid_extra_keys=True,
        _cattrs_detailed_validation=True,
        **overrides,  # type: ignore[arg-type]
    )

    def hook(value: object, into: Any) -> Any:
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise MisfitError(f"is {shown(value)}, expected a table")
        return from_table(value, into)

    return hook


def _not_none(hint: Any) -> Any:
    """Return `X` of `X | None`: TOML has no null, and an absent key takes the default."""
    if get_origin(hint) not in (Union, UnionType) or type(None) not in get_args(hint):
        return hint
    rest = tuple(arg for arg in get_args(hint) if arg is not type(None))
    return rest[0] if len(rest) == 1 else Union[rest]  # noqa: UP007 (built from a tuple)


def _origin(hint: Any) -> Any:
    return get_origin(hint)


def _converter() -> Converter:
    converter = Converter(detailed_validation=True)
    converter.register_structure_hook(int, _whole)
    converter.register_structure_hook(float, _real)
    converter.register_structure_hook(str, _text)
    converter.register_structure_hook(bool, _truth)
    converter.register_structure_hook_func(lambda t: _origin(t) is Literal, _literal)
    converter.register_structure_hook_func(lambda t: t == WholeOrAuto, _whole_or_auto)
    converter.register_structure_hook_func(lambda t: _origin(t) is tuple, _tuple)
    converter.register_structure_hook_factory(lambda t: _origin(t) is dict, _tables)
    converter.register_structure_hook_func(lambda t: t in TAGGED, _tagged)
    converter.register_structure_hook_factory(attrs.has, _class_hook)
    return converter


_CONVERTER: Final = _converter()
