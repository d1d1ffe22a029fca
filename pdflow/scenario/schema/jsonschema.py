"""The schema of scenario files as a JSON Schema (draft 2020-12), for editors and other programs.

It is generated from the same classes and bounds that the loader uses. It says what one key may be; what keys must be to
each other (`validate.py`) is beyond it, so that a file may satisfy it and still be refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

import attrs

from pdflow.cost.specs import GpuSpec, ModelSpec
from pdflow.scenario.presets import ALIASES, Kind, presets
from pdflow.scenario.reading.convert import TAGGED, Tagged
from pdflow.scenario.reading.document import DTYPES, REQUIRED_TABLES, TABLES
from pdflow.scenario.schema.fields import Bound, WholeOrAuto, key_of
from pdflow.scenario.schema.network import Network

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"

_PLAIN: Final[Mapping[Any, dict[str, Any]]] = {
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    bool: {"type": "boolean"},
}


def schema_json() -> dict[str, Any]:
    """Return the JSON Schema of a scenario file, as plain data."""
    properties = {key: _table(key, cls) for key, cls in TABLES.items()}
    return {
        "$schema": DIALECT,
        "title": "pdflow scenario",
        "description": "A prefill/decode-disaggregated cluster and the requests that it serves.",
        "type": "object",
        "properties": properties,
        "required": [table for table in REQUIRED_TABLES if table != "model"],
        "anyOf": [
            {"required": ["model"], "properties": {"model": {"anyOf": _specifications()}}},
            {"required": ["serve"], "properties": {"serve": {"required": ["model"]}}},
        ],
        "additionalProperties": False,
    }


def _table(key: str, cls: Any) -> dict[str, Any]:
    if key == "model":
        return _model()
    if key == "fault":
        return {"type": "array", "items": _tagged(TAGGED[cls])}
    schema = _object(cls)
    if key == "scale":
        return {"type": "array", "items": schema}
    return {"type": "array", "minItems": 1, "items": schema} if key == "pool" else schema


def _object(cls: type, *, tag: tuple[str, str] | None = None) -> dict[str, Any]:
    """Return the schema of a table with the keys of an attrs class, and the tag of its kind if it is one of several."""
    hints = get_type_hints(cls)
    properties: dict[str, Any] = {} if tag is None else {tag[0]: {"const": tag[1]}}
    required = [] if tag is None else [tag[0]]
    for field in attrs.fields(cls):
        properties[key_of(field)] = _property(field, hints[field.name])
        if field.default is attrs.NOTHING and not field.metadata.get("preset"):
            required.append(key_of(field))
    schema: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
    if cls is Network:
        properties["preset"]["anyOf"] = [{"enum": list(presets("links"))}, {"pattern": r"\.toml$"}]
    if cls.__module__.startswith("pdflow.scenario") and cls.__doc__:
        schema["description"] = cls.__doc__.split("\n")[0]
    return schema | ({"required": required} if required else {})


def _property(field: attrs.Attribute[Any], hint: Any) -> dict[str, Any]:
    schema = {"type": "number"} if field.metadata.get("rate") else _value(hint)
    bound: Bound | None = field.metadata.get("bound")
    if bound is not None:
        schema = schema | _limits(bound, schema)
    if field.metadata.get("doc"):
        schema = schema | {"description": field.metadata["doc"]}
    if isinstance(field.default, (bool, int, float, str)):
        schema = schema | {"default": field.default}
    return schema


def _limits(bound: Bound, schema: Mapping[str, Any]) -> dict[str, Any]:
    length = "minItems" if schema.get("type") == "array" else "minLength"
    limits = {
        "exclusiveMinimum": bound.above,
        "minimum": bound.at_least,
        "maximum": bound.at_most,
        length: bound.min_length,
    }
    return {key: limit for key, limit in limits.items() if limit is not None}


def _value(hint: Any) -> dict[str, Any]:
    """Return the schema of one type; None in a union is the absence of the key."""
    options = tuple(arg for arg in get_args(hint) if arg is not NoneType)
    union = get_origin(hint) in (Union, UnionType)
    if union and len(options) == 1:
        return _value(options[0])
    if union and set(options) == set(get_args(WholeOrAuto)):
        return {"oneOf": [_value(option) for option in options]}
    for tagged_union, tagged in TAGGED.items():
        if union and set(options) == set(get_args(tagged_union)):
            return _tagged(tagged)
    if hint in _PLAIN:
        return dict(_PLAIN[hint])
    if get_origin(hint) is Literal:
        return {"enum": list(options)}
    if get_origin(hint) is tuple:
        return {"type": "array", "items": _value(options[0])}
    if get_origin(hint) is dict:
        return {"type": "object", "additionalProperties": _value(options[1])}
    if hint is GpuSpec:
        return {"oneOf": [{"enum": _names("gpus")}, _specified(GpuSpec, "gpus")]}
    return _object(hint)


def _tagged(tagged: Tagged) -> dict[str, Any]:
    kinds = [_object(cls, tag=(tagged.tag, name)) for name, cls in tagged.kinds.items()]
    bare = [] if tagged.bare is None else [_bare(tagged.kinds[tagged.bare])]
    return {"oneOf": [*bare, *kinds]}


def _bare(kind: type) -> dict[str, Any]:
    """Return the schema of the number that may stand for a kind's only key."""
    (only,) = attrs.fields(kind)
    schema = _property(only, get_type_hints(kind)[only.name])
    return {key: value for key, value in schema.items() if key != "description"}


def _specified(cls: type, kind: Kind) -> dict[str, Any]:
    """Return the schema of a table that either starts from a preset or has every key without a default."""
    schema = _object(cls)
    required = schema.pop("required")
    schema["properties"] = {"preset": {"enum": _names(kind)}, **schema["properties"]}
    return schema | {"anyOf": [{"required": ["preset"]}, {"required": required}]}


def _names(kind: Kind) -> list[str]:
    """Return the names of the presets of a kind, then their aliases."""
    return [*presets(kind), *ALIASES[kind]]


def _model() -> dict[str, Any]:
    schema = _specified(ModelSpec, "models")
    schema["properties"] |= {key: {"enum": list(sizes)} for key, (_, sizes) in DTYPES.items()}
    schema["properties"]["hf_config"] = {"type": "string", "minLength": 1}
    del schema["anyOf"]
    schema["description"] = (
        "[model]: a preset, a preset with some values replaced, or a complete specification. "
        "What is absent here comes from the folder in serve.model."
    )
    return schema


def _specifications() -> list[dict[str, Any]]:
    """Return what [model] must have, one of these, where serve.model does not name the model."""
    return [*_specified(ModelSpec, "models")["anyOf"], {"required": ["hf_config"]}]
