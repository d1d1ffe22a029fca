"""What holds of all parameters: written and read again they are the same, and whatever is sent, one error is all."""

from __future__ import annotations

import json
import re
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdflow.methods.params import kinds
from pdflow.methods.params.errors import ParamsError
from pdflow.methods.params.extras import EXTRAS, Extras, Params
from pdflow.methods.params.fields import spec_of
from pdflow.methods.params.parse import PARAMS, parse, to_json
from pdflow.methods.params.request_id import DECODE, PREFILL, PairId, parse_request_id, wrapped

u64 = st.integers(0, 2**64 - 1)
texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=40)
hosts = st.from_regex(r"[a-z0-9]([a-z0-9.-]{0,30}[a-z0-9])?", fullmatch=True) | st.ip_addresses(v=6).map("[{}]".format)
ports = st.integers(1, 65_535)
addresses = st.builds("{}:{}".format, hosts, ports)


def lists(entries: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    flat = st.lists(entries, max_size=4).map(tuple)
    return flat | st.lists(st.none() | flat, max_size=4).map(tuple)


VALUES = {
    kinds.ID: texts,
    kinds.NAME: texts,
    kinds.HOST: hosts,
    kinds.PORT: ports,
    kinds.RANKS: st.integers(1, 4_096),
    kinds.TOKENS: st.integers(0, 2**32 - 1),
    kinds.U64: u64,
    kinds.YES: st.just(True),
    kinds.NO: st.just(False),
    kinds.SECONDS: st.integers(0, 10**6) | st.floats(0, 1e6),
    kinds.BOOTSTRAP: addresses.map("http://{}".format),
    kinds.BLOCKS: st.lists(st.integers(0, 2**32 - 1), max_size=6).map(tuple),
    kinds.TOKEN_LISTS: lists(st.integers(0, 2**32 - 1)),
    kinds.KEY_LISTS: lists(texts),
    kinds.LEASE_WORDS: st.lists(st.tuples(u64, u64), max_size=4).map(tuple),
}


def made(params: type[Any]) -> st.SearchStrategy[Any]:
    """Any object of a class, by the kinds of its fields."""
    values = {}
    for field in attrs.fields(params):
        kind, default = spec_of(field).kind, field.default
        if kind is EXTRAS:
            value = made(Extras)
        elif kind in VALUES:
            value = VALUES[kind]
        else:  # the one value that it takes, if it is not a number
            value = st.integers(1, 64) if field.name == "block_size" else st.just(default)
        values[field.name] = st.none() | value if default is None else value
    return st.builds(params, **values)


LEGS = [(method, leg, params) for method, legs in PARAMS.items() for leg, params in legs.items()]
messages = st.sampled_from(LEGS).flatmap(lambda leg: st.tuples(st.just(leg[0]), st.just(leg[1]), made(leg[2])))


@given(messages)
def test_written_and_read_again_they_are_the_same(message: tuple[str, str, Params]) -> None:
    method, leg, params = message
    text = json.dumps(to_json(params))
    assert parse(method, leg, json.loads(text)) == params


leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**4000, -(10**4000), 2**63, 2**64])
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["\ud800", "\x00", "a" * 100_000, "http://", "http://:1", "[::1]:1", "1e400"])
)
anything = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)


def deep(depth: int) -> Any:
    """An array in an array in an array ..."""
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def safe(error: ParamsError) -> bool:
    """A line that may stand in a log and in an answer."""
    return str(error).isprintable() and len(str(error)) < 800


def answered(method: str, leg: str, payload: Any) -> None:
    """Read, and then whole: it can be written and read again; or refused, with the one error."""
    try:
        params = parse(method, leg, payload)
    except ParamsError as error:
        params = error
    assert safe(params) if isinstance(params, ParamsError) else parse(method, leg, to_json(params)) == params


@given(st.sampled_from(LEGS), anything)
def test_whatever_is_sent_one_error_is_all(leg: tuple[str, str, Any], payload: Any) -> None:
    answered(*leg[:2], payload)


@given(messages, st.data())
def test_whatever_stands_in_one_field_one_error_is_all(message: tuple[str, str, Params], data: st.DataObject) -> None:
    method, leg, params = message
    payload = to_json(params)
    key = data.draw(st.sampled_from([field.name for field in attrs.fields(type(params))]))
    answered(method, leg, payload | {key: data.draw(anything)})


@given(messages, st.data())
def test_whatever_is_left_out_one_error_is_all(message: tuple[str, str, Params], data: st.DataObject) -> None:
    method, leg, params = message
    payload = to_json(params)
    kept = data.draw(st.sets(st.sampled_from(sorted(payload)))) if payload else set()
    answered(method, leg, {key: payload[key] for key in kept})


@pytest.mark.parametrize("hostile", [deep(100_000), ["k"] * 200_000, [deep(50_000)] * 3], ids=["deep", "long", "both"])
def test_depth_and_length_are_no_danger(hostile: Any) -> None:
    for method, leg, params in LEGS:
        for field in attrs.fields(params):
            answered(method, leg, {field.name: hostile})
        answered(method, leg, hostile)
    answered("kv-store", "decode", {"kvcache_load_keys": hostile})
    answered("nixl-pull", "decode", {"pdflow": {"xid": "a", "lease": hostile}})
    with pytest.raises(ParamsError):
        parse_request_id(hostile)


pairs = st.builds(PairId, prefill=addresses, decode=addresses, uuid=st.uuids().map(lambda uuid: uuid.hex))


@given(pairs, st.integers(0, 99), st.booleans(), st.booleans())
def test_a_request_id_is_read_as_it_was_built(pair: PairId, index: int, chat: bool, randomised: bool) -> None:
    text = wrapped(pair, index, chat=chat) + ("-0a1b2c3d" if randomised else "")
    assert parse_request_id(pair.text()) == (pair, 0)
    assert parse_request_id(text) == (pair, 0 if chat else index)


@given(pairs)
def test_the_originals_patterns_find_the_same(pair: PairId) -> None:
    """P2pNcclConnector.parse_request_id, which searches."""
    text = wrapped(pair)
    to_d = re.search(r"___decode_addr_(.*):(\d+)", text)
    to_p = re.search(r"___prefill_addr_(.*):(\d+)___", text)
    assert to_d is not None
    assert to_p is not None
    assert (to_d[1], int(to_d[2])) == pair.decode_rank(0)
    assert (to_p[1], int(to_p[2])) == pair.prefill_rank(0)


@given(
    st.lists(
        st.sampled_from(
            [PREFILL, DECODE, "cmpl-", "-0", "_", "___", "10.0.0.1:80", ":", "é", "\ud800", "0" * 32, "a" * 600]
        )
        | st.text(max_size=5),
        max_size=8,
    ).map("".join)
    | anything
)
def test_whatever_a_request_id_is_one_error_is_all(request_id: Any) -> None:
    try:
        read = parse_request_id(request_id)
    except ParamsError as error:
        read = error
    assert safe(read) if isinstance(read, ParamsError) else parse_request_id(wrapped(*read)) == read
