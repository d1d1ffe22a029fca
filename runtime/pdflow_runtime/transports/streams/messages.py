"""The messages between two agents: typed msgpack behind a length, checked before use.

    message = length: 4 bytes, big-endian | body: one msgpack array, tagged by its first element
    payload = the bytes of a Write or Data over tcp, directly behind its message

Lists of pieces are packed numbers of 8 bytes, little-endian, as every machine has them that serves models: a list of
10,000 in msgpack would cost five times as much. What a peer sends here can at worst close that peer's stream.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Iterable
from itertools import chain
from operator import add
from typing import Annotated, Any, Final, NamedTuple, TypeAlias

import msgspec
import numpy as np

from pdflow.layout.descriptors import Descriptor
from pdflow.protocol.values import Value
from pdflow.protocol.wire.limits import MAX_NAME_BYTES
from pdflow.protocol.wire.malformed import Malformed, malformed, unpack
from pdflow_runtime.transports.segments import DescribedSegments, Extent, SegmentMap, parse_segments

LENGTH_BYTES: Final = 4
MAX_MESSAGE_BYTES: Final = 8 << 20
"""The largest message: some 340,000 pieces of one WRITE; vLLM's largest reports are of 112,000 (vllm #55434)."""
MAX_HELLO_BYTES: Final = 512 << 10
"""The largest message from a peer that has not introduced itself. NIXL's part of it is 0.5 KiB and 44 bytes for each
segment on one network device, more on many; ours is up to 31 bytes for each."""
MAX_NOTIFICATION_BYTES: Final = 64 << 10
TOKEN_BYTES: Final = 16
WORD_BYTES: Final = 8
NUMBERS_PER_PIECE: Final = 3
PIECE_BYTES: Final = NUMBERS_PER_PIECE * WORD_BYTES
FEW_PIECES: Final = 32
"""The number of pieces up to which Python's own numbers are faster than arrays."""


class Description(Value, frozen=True, gc=False, array_like=True):
    """The description of an agent for its peers, as `describe` returns it."""

    transport: str
    incarnation: int
    """Drawn anew by every agent, so that two incarnations of one rank are never taken for each other."""
    token: bytes
    """The secret that a peer must show to be let in: it is sent to peers alone."""
    host: str
    """The address of the listening socket; for shm its path."""
    port: int
    memory: str
    """The path of the region; empty where a peer cannot map it."""
    nbytes: int
    agent: bytes = b""
    """The metadata of NIXL's agent or Mooncake's engine, by which it is reached."""
    segments: DescribedSegments = ()
    """The segments of the region, where it has several or peers fetch from their addresses."""


class AgentHello(Value, frozen=True, gc=False, array_like=True, tag="hello"):
    """The first message of the agent that opened the stream: its name, and the incarnation that it means to reach."""

    version: int
    name: str
    incarnation: int
    target_incarnation: int
    token: bytes
    memory: str
    nbytes: int
    agent: bytes = b""
    segments: DescribedSegments = ()


class Welcome(Value, frozen=True, gc=False, array_like=True, tag="welcome"):
    """The answer to AgentHello; without it the stream ends."""


class ConnectionRefused(Value, frozen=True, gc=False, array_like=True, tag="refused"):
    """The answer that another agent listens here now: proof that the one before is gone, for a port has one owner at a
    time."""

    incarnation: int


class Write(Value, frozen=True, gc=False, array_like=True, tag="write"):
    """A request to copy these pieces into the receiver's memory. Over tcp their bytes follow."""

    op: int
    generation: int
    pieces: bytes
    notification: bytes | None


class Ready(Value, frozen=True, gc=False, array_like=True, tag="ready"):
    """The answer that the bytes of this Write can come (nccl)."""

    op: int


class ReadRequest(Value, frozen=True, gc=False, array_like=True, tag="read"):
    """A request to send the bytes of these pieces of the receiver's memory (tcp, nccl)."""

    op: int
    pieces: bytes


class ReadWordRequest(Value, frozen=True, gc=False, array_like=True, tag="read word"):
    """A request for the value of the 8 bytes at an address (tcp, nccl)."""

    op: int
    address: int


class ReadOver(Value, frozen=True, gc=False, array_like=True, tag="read over"):
    """The message that the sender fetches no more for this READ (nixl)."""

    op: int


class OperationEnded(Value, frozen=True, gc=False, array_like=True, tag="answer"):
    """The end of a Write, or the refusal of a READ."""

    op: int
    ok: bool


class WordValue(Value, frozen=True, gc=False, array_like=True, tag="word"):
    """The answer to a ReadWordRequest; None if there is no such word."""

    op: int
    value: int | None


class Data(Value, frozen=True, gc=False, array_like=True, tag="data"):
    """The answer to a ReadRequest; so many bytes follow (tcp), or can be received (nccl)."""

    op: int
    nbytes: Annotated[int, msgspec.Meta(ge=0)]


Message: TypeAlias = (
    AgentHello
    | Welcome
    | ConnectionRefused
    | Write
    | Ready
    | ReadRequest
    | ReadWordRequest
    | ReadOver
    | OperationEnded
    | WordValue
    | Data
)

VERSION: Final = 2
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_descriptions: msgspec.msgpack.Decoder[Description] = msgspec.msgpack.Decoder(Description)


def frame(message: Message) -> bytes:
    body = _encoder.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def parse(body: bytes | bytearray | memoryview) -> Message | Malformed:
    return unpack(_decoder, memoryview(body))


def parse_description(description: bytes) -> Description | Malformed:
    found = unpack(_descriptions, description)
    if isinstance(found, Description):
        named = all(len(t) <= MAX_NAME_BYTES and t.isprintable() for t in (found.transport, found.host, found.memory))
        if len(found.token) != TOKEN_BYTES or not named or found.nbytes < 0 or not 0 <= found.port < 1 << 16:
            return malformed("not a description of an agent")
        extent = extent_of(found)
        if isinstance(extent, Malformed):
            return extent
    return found


def extent_of(described: Description | AgentHello) -> Extent | Malformed:
    """Return the bounds of the memory that a peer describes."""
    return parse_segments(described.segments, described.nbytes) if described.segments else described.nbytes


def same_token(shown: bytes, token: bytes) -> bool:
    """Compare two tokens, in a time that says nothing about how much of it was right."""
    return secrets.compare_digest(shown, token)


def word_at(memory: memoryview, address: int) -> int | None:
    """Return the word at this address; None where no word can be."""
    if address % WORD_BYTES or not 0 <= address <= len(memory) - WORD_BYTES:
        return None
    return int.from_bytes(memory[address : address + WORD_BYTES], "little")


class PackedPieces(NamedTuple):
    """The checked pieces of one operation, as they were packed, and the sum of their bytes."""

    packed: bytes
    nbytes: int

    @property
    def number(self) -> int:
        return len(self.packed) // PIECE_BYTES

    def lists(self) -> tuple[list[int], list[int], list[int]]:
        """Return sources, targets and lengths as lists."""
        numbers = array("Q", self.packed)
        return numbers[0::3].tolist(), numbers[1::3].tolist(), numbers[2::3].tolist()

    def columns(self) -> Any:
        """Return sources, targets and lengths as an array of u64, [3, number]."""
        return np.frombuffer(self.packed, "<u8").reshape(-1, NUMBERS_PER_PIECE).T


def pack(pieces: Iterable[Descriptor]) -> bytes:
    """Pack the pieces. OverflowError if a number is negative or beyond 64 bits."""
    return array("Q", chain.from_iterable(pieces)).tobytes()


def unpack_pieces(data: bytes, source: Extent, target: Extent) -> PackedPieces | Malformed:
    """Return the pieces; Malformed unless every one lies within both regions, and within one segment of each."""
    source_bytes, target_bytes = _bytes_of(source), _bytes_of(target)
    if len(data) % PIECE_BYTES:
        return malformed("a truncated list of pieces")
    lengths: Any
    if len(data) <= FEW_PIECES * PIECE_BYTES:
        sources, targets, lengths = PackedPieces(data, 0).lists()
        furthest = max(map(add, sources, lengths), default=0), max(map(add, targets, lengths), default=0)
        beyond = furthest[0] > source_bytes or furthest[1] > target_bytes
        nbytes = sum(lengths)
    else:
        sources, targets, lengths = PackedPieces(data, 0).columns()
        beyond = _beyond(sources, lengths, source_bytes) or _beyond(targets, lengths, target_bytes)
        nbytes = int(lengths.sum())
    if beyond:
        return malformed(f"a piece outside its source ({source_bytes:,} bytes) or its target ({target_bytes:,})")
    for extent, offsets in ((source, sources), (target, targets)):
        if isinstance(extent, SegmentMap) and extent.is_crossed(offsets, lengths):
            return malformed("a piece that is not within one segment")
    return PackedPieces(data, nbytes)


def pack_checked(
    pieces: Iterable[Descriptor], source: Extent, target: Extent
) -> tuple[bytes, PackedPieces] | Malformed:
    """Pack the pieces of one operation for its message; Malformed if the message could not be read."""
    try:
        packed = pack(pieces)
    except OverflowError:
        packed = b"?"
    checked = unpack_pieces(packed, source, target)
    if isinstance(checked, Malformed):
        return checked
    if len(packed) > MAX_MESSAGE_BYTES - MAX_NOTIFICATION_BYTES - 64:
        return malformed(f"{checked.number} pieces are too many")
    return packed, checked


def _bytes_of(extent: Extent) -> int:
    return extent if isinstance(extent, int) else extent.nbytes


def _beyond(offsets: Any, lengths: Any, nbytes: int) -> bool:
    """True if a piece lies beyond its region. No sum is made: it could pass 64 bits, and look small."""
    return int(lengths.max()) > nbytes or bool((offsets > nbytes - lengths).any())
