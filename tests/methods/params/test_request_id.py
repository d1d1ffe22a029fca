"""P2P NCCL's request id: the seed's grammar, vLLM's wrapping, and what is no such id."""

from __future__ import annotations

import pytest

from pdflow.methods.params.errors import ParamsError
from pdflow.methods.params.request_id import MOST_BYTES, PairId, parse_request_id, wrapped

UUID = "93923d63113b4b338973f24d19d4bf11"
TEXT = f"___prefill_addr_10.0.1.2:21001___decode_addr_10.0.1.3:22001_{UUID}"
PAIR = PairId(prefill="10.0.1.2:21001", decode="10.0.1.3:22001", uuid=UUID)


def test_the_proxys_text() -> None:
    assert PAIR.text() == TEXT


@pytest.mark.parametrize(
    ("request_id", "index"),
    [
        (TEXT, 0),
        (f"cmpl-{TEXT}-0", 0),
        (f"cmpl-{TEXT}-3", 3),
        (f"chatcmpl-{TEXT}", 0),
        (f"cmpl-{TEXT}-3-0a1b2c3d", 3),
        (f"chatcmpl-{TEXT}-0a1b2c3d", 0),
    ],
)
def test_bare_wrapped_and_randomised(request_id: str, index: int) -> None:
    assert parse_request_id(request_id) == (PAIR, index)


def test_vllms_wrapping() -> None:
    assert wrapped(PAIR) == f"cmpl-{TEXT}-0"
    assert wrapped(PAIR, chat=True) == f"chatcmpl-{TEXT}"


def test_a_rank_listens_as_many_ports_higher() -> None:
    assert PAIR.prefill_rank(0) == ("10.0.1.2", 21001)
    assert PAIR.decode_rank(3) == ("10.0.1.3", 22004)


@pytest.mark.parametrize(
    "request_id",
    [
        "",
        None,
        7,
        "cmpl-1234-0",
        TEXT.replace("___decode_addr_", "___decode_"),
        TEXT.replace("___prefill_addr_", ""),
        TEXT[:-1],
        TEXT + "a",
        TEXT + "-0-1",
        TEXT.upper(),
        "x-" + TEXT,
        TEXT.replace(":21001", ""),
        TEXT.replace(":21001", ":0"),
        TEXT.replace(":21001", ":65536"),
        TEXT.replace(":21001", ":+210"),
        TEXT.replace(":22001", ":２２００１"),
        TEXT.replace("10.0.1.2", ""),
        TEXT.replace("10.0.1.2", "10.0.1.2 "),
        TEXT.replace("10.0.1.2", "::1"),
        TEXT.replace("10.0.1.2", "a" * 600),
        TEXT + TEXT,
    ],
)
def test_anything_else_is_refused(request_id: object) -> None:
    with pytest.raises(ParamsError, match="request_id"):
        parse_request_id(request_id)


def test_the_port_that_is_wrong_is_named() -> None:
    with pytest.raises(ParamsError) as caught:
        parse_request_id(TEXT.replace("22001", "220010"))
    assert str(caught.value) == (
        'request_id\'s decode address is "10.0.1.3:220010": the port is "220010", not 1 to 65,535, expected HOST:PORT'
    )


def test_an_id_leaves_room_for_what_vllm_puts_around_it() -> None:
    with pytest.raises(ParamsError, match=f"{MOST_BYTES} in all"):
        PairId(prefill=f"{'p' * 240}:1", decode=f"{'d' * 240}:1", uuid=UUID)


def test_a_pair_that_no_id_can_encode_is_refused() -> None:
    with pytest.raises(ParamsError, match="has no ___"):
        PairId(prefill="p___decode_addr_:1", decode="d:1", uuid=UUID)
    with pytest.raises(ParamsError, match="32 hex digits"):
        PairId(prefill="p:1", decode="d:1", uuid="u")
