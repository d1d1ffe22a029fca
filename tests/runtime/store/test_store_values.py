"""Values in a store's server: what comes back is exactly what was put there under that name, or it is bad."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdflow.layout.descriptors import Nesting, PlaneOrder, RankMemory, rank_memory
from pdflow.layout.shapes import KvShape
from pdflow_runtime.security.secret import MAC_BYTES, Secret
from pdflow_runtime.store.values import HEADER_BYTES, BadValueError, Cells, ValueFormat, layout_of

SHAPE = KvShape(3, 4, head_dim=2, bytes_per_value=2, block_size=4)
BLOCKS = 5
KEY = "0123456789abcdef" * 2
SECRET = Secret(b"a secret of the tests, long enough")


def memories(tp: int, nesting: Nesting = "layer-major", order: PlaneOrder = "HND") -> list[RankMemory]:
    return [rank_memory(SHAPE, BLOCKS, tp, nesting=nesting, order=order) for _ in range(tp)]


def form(rank_memories: Sequence[RankMemory], model: str = "tiny", secret: Secret | None = SECRET) -> ValueFormat:
    return ValueFormat(
        layout_of(model, SHAPE, rank_memories),
        Cells([(memoryview(b""), memory) for memory in rank_memories]).block_bytes,
        secret,
    )


FORM = form(memories(1))


def value_of(blocks: int = 2, by: ValueFormat = FORM, key: str = KEY) -> bytearray:
    value = bytearray(by.nbytes(blocks))
    value[HEADER_BYTES:] = bytes(at % 251 for at in range(len(value) - HEADER_BYTES))
    by.seal(key, value)
    return value


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("nesting", ["layer-major", "block-major"])
def test_kv_comes_back_wherever_there_is_room(tp: int, nesting: Nesting) -> None:
    """Even in memory that is laid out otherwise."""
    nbytes = BLOCKS * SHAPE.block_size * SHAPE.bytes_per_token // tp
    here = [bytearray(bytes((at + rank) % 251 for at in range(nbytes))) for rank in range(tp)]
    there = [bytearray(nbytes) for _ in range(tp)]
    source = Cells(list(zip(map(memoryview, here), memories(tp), strict=True)))
    target = Cells(list(zip(map(memoryview, there), memories(tp, nesting), strict=True)))
    kv = bytearray(2 * source.block_bytes)
    assert source.block_bytes == SHAPE.block_size * SHAPE.bytes_per_token
    source.copy_out([4, 1], memoryview(kv))
    target.copy_in([0, 3], memoryview(kv))
    again = bytearray(len(kv))
    target.copy_out([0, 3], memoryview(again))
    assert again == kv
    # And nothing else has been touched: those blocks once more, as far as there is anything.
    target.copy_in([0, 3], memoryview(bytes(len(kv))))
    assert not any(map(any, there))


def test_what_was_put_there_comes_back() -> None:
    value = value_of()
    assert FORM.opened(KEY, 2, bytes(value)) == value[HEADER_BYTES:]


@given(at=st.integers(0, len(value_of()) - 1), flip=st.integers(1, 255))
def test_no_byte_may_be_another(at: int, flip: int) -> None:
    value = value_of()
    value[at] ^= flip
    with pytest.raises(BadValueError, match="wrong header" if at < HEADER_BYTES - MAC_BYTES else "wrong MAC"):
        FORM.opened(KEY, 2, bytes(value))


@given(value=st.binary(max_size=2 * len(value_of())))
def test_no_other_bytes_are_a_value(value: bytes) -> None:
    for blocks in (1, 2):
        with pytest.raises(BadValueError):
            FORM.opened(KEY, blocks, value)


@pytest.mark.parametrize(
    "value",
    [
        value_of(blocks=1),
        value_of(blocks=3),
        value_of(key=KEY[::-1]),
        value_of(by=form(memories(2))),
        value_of(by=form(memories(1, order="NHD"))),
        value_of(by=form(memories(1), model="another")),
        value_of(by=form(memories(1), secret=None)),
        value_of(by=form(memories(1), secret=Secret(b"another secret, long enough"))),
        value_of()[:-1],
        value_of() + b"x",
    ],
)
def test_what_was_put_for_something_else_is_bad(value: bytearray) -> None:
    with pytest.raises(BadValueError):
        FORM.opened(KEY, 2, bytes(value))


def test_layouts_have_names_of_their_own() -> None:
    layouts = [memories(1), memories(2), memories(1, order="NHD")]
    names = [form(each).name(KEY) for each in layouts] + [form(memories(1), "another").name(KEY)]
    assert len(set(names)) == len(names)
    assert form(memories(1, "block-major")).name(KEY) == FORM.name(KEY)
