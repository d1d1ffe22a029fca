"""The format of the values that a store's node keeps in a server: one for each object, a header and behind it the KV.

The KV stands in an order of its own (rank, layer, K or V, block), so that it does not matter how a node's memory is
laid out. What does matter, the layout within a block, stands in the value's name and in its header as a hash; weights
and tokens are in the object's key. The header ends with a MAC over all that, the name and the bytes, by the cluster's
secret. Without a secret it is no more than a checksum: every process that can write to the server can make one.

Whatever a server answers is data. What is not exactly what was put there under that name is a BadValueError.

    magic 4 | version 4 | length 8 | layout 16 | MAC 32 | KV
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Final

import msgspec

from pdflow.layout.descriptors import RankMemory
from pdflow.layout.shapes import KvShape
from pdflow.methods.store.keys import Key
from pdflow_runtime.security.secret import MAC_BYTES, Secret

MAGIC: Final = b"pdkv"
VERSION: Final = 1
LAYOUT_BYTES: Final = 16
PURPOSE: Final = b"pdflow object in a store"
NO_SECRET: Final = Secret(b"no secret: whoever can write there can make this")
_HEADER: Final = struct.Struct(f">4sIQ{LAYOUT_BYTES}s")
HEADER_BYTES: Final = _HEADER.size + MAC_BYTES


class BadValueError(ValueError):
    """Raised for a value that is not what was put there; the text says how that was seen, and holds nothing of the
    value."""


def layout_of(model: str, shape: KvShape, memories: Sequence[RankMemory]) -> bytes:
    """Return [LAYOUT_BYTES] that are equal for two nodes exactly if each can use the other's values."""
    ranks = [(memory.num_layers, memory.tensors_per_layer, memory.num_heads, memory.order) for memory in memories]
    encoded = msgspec.json.encode((model, shape, ranks))
    return blake2b(encoded, digest_size=LAYOUT_BYTES, person=b"pdflow layout").digest()


class ValueFormat:
    """The format of the values of one layout. `block_bytes`: the size of one block, at all ranks together."""

    def __init__(self, layout: bytes, block_bytes: int, secret: Secret | None) -> None:
        self.layout: Final = layout
        self.block_bytes: Final = block_bytes
        self._secret: Final = secret or NO_SECRET

    def name(self, key: Key) -> str:
        return f"pdflow:kv{VERSION}:{self.layout.hex()}:{key}"

    def nbytes(self, blocks: int) -> int:
        """Return the size of the value of an object of so many blocks."""
        return HEADER_BYTES + blocks * self.block_bytes

    def seal(self, key: Key, value: bytearray) -> None:
        """Write a value's header before its KV, which is there already."""
        header = _HEADER.pack(MAGIC, VERSION, len(value) - HEADER_BYTES, self.layout)
        mac = self._secret.mac(PURPOSE, header, self.name(key).encode(), memoryview(value)[HEADER_BYTES:])
        value[:HEADER_BYTES] = header + mac

    def opened(self, key: Key, blocks: int, value: bytes) -> memoryview:
        """Check a value and return the KV of its object, which has so many blocks. BadValueError."""
        if len(value) != self.nbytes(blocks):
            raise BadValueError("has a wrong length")
        view = memoryview(value)
        header, mac, kv = view[: _HEADER.size], view[_HEADER.size : HEADER_BYTES], view[HEADER_BYTES:]
        if header != _HEADER.pack(MAGIC, VERSION, len(kv), self.layout):
            raise BadValueError("has a wrong header")
        if not self._secret.is_mac(mac, PURPOSE, header, self.name(key).encode(), kv):
            raise BadValueError("has a wrong MAC: it is corrupt, or was written without this cluster's secret")
        return kv


class Cells:
    """The memories of a node's ranks, in the order in which values have them: each a view, and its layout."""

    def __init__(self, ranks: Sequence[tuple[memoryview, RankMemory]]) -> None:
        self.ranks: Final = ranks
        self.block_bytes: Final = sum(
            memory.num_layers * memory.tensors_per_layer * memory.plane_bytes for _, memory in ranks
        )

    def copy_out(self, blocks: Sequence[int], target: memoryview) -> None:
        at = 0
        for view, offset, length in self._planes(blocks):
            target[at : at + length] = view[offset : offset + length]
            at += length

    def copy_in(self, blocks: Sequence[int], source: memoryview) -> None:
        at = 0
        for view, offset, length in self._planes(blocks):
            view[offset : offset + length] = source[at : at + length]
            at += length

    def _planes(self, blocks: Sequence[int]) -> Iterator[tuple[memoryview, int, int]]:
        for view, memory in self.ranks:
            length = memory.plane_bytes
            for layer in range(memory.num_layers):
                for tensor in range(memory.tensors_per_layer):
                    for block in blocks:
                        yield view, memory.plane_address(layer, tensor, block), length
