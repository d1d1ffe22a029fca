"""The request id of P2P NCCL, in which the proxy names both addresses (vLLM #18242).

    ___prefill_addr_10.0.1.2:21001___decode_addr_10.0.1.3:22001_93923d63113b4b338973f24d19d4bf11

Sent as X-Request-Id. vLLM makes `cmpl-{id}-{prompt index}` of it, or `chatcmpl-{id}`, and since ids are randomised
puts `-` and 8 hex digits behind, others in each engine (spec 1.2). The original keys every tensor by that whole
text, so that then P's keys are not D's; what is the same in both engines is `PairId.text()` with `index`.

The original looks for an address anywhere in the text; here the whole text has to be of this form.
"""

from __future__ import annotations

import re
from typing import Final

import attrs

from pdflow.methods.params.address import AddressError, split_address
from pdflow.methods.params.errors import ParamsError, shown
from pdflow.methods.params.kinds import bounded_text
from pdflow.protocol.wire.limits import MAX_ID_BYTES

PREFILL: Final = "___prefill_addr_"
DECODE: Final = "___decode_addr_"

MOST_BYTES: Final = MAX_ID_BYTES - 32
"""The most bytes of the bare id. What vLLM puts around it has to fit too."""

_TAIL: Final = re.compile(r"([0-9a-f]{32})(?:-(\d{1,6}))?(?:-[0-9a-fA-F]{8})?\Z", re.ASCII)
_EXPECTED: Final = f"{PREFILL}HOST:PORT{DECODE}HOST:PORT_ and 32 hex digits, perhaps as vLLM's cmpl-...-0"


def _address(_instance: object, attribute: attrs.Attribute[str], value: object) -> None:
    _split(attribute.name, value)


def _hex(_instance: object, attribute: attrs.Attribute[str], value: object) -> None:
    if not (isinstance(value, str) and re.fullmatch(r"[0-9a-f]{32}", value, re.ASCII)):
        raise ParamsError(attribute.name, f"is {shown(value)}", "32 hex digits, as uuid4().hex")


@attrs.frozen(kw_only=True)
class PairId:
    """The content of a request id: both addresses and a uuid. Addresses are those of rank 0; rank r of an engine
    listens r ports higher, on both sides."""

    prefill: str = attrs.field(validator=_address)
    decode: str = attrs.field(validator=_address)
    uuid: str = attrs.field(validator=_hex)

    def __attrs_post_init__(self) -> None:
        if len(self.text()) > MOST_BYTES:
            raise ParamsError("request_id", f"has {len(self.text())} bytes", f"shorter addresses, {MOST_BYTES} in all")

    def text(self) -> str:
        """Return the id for X-Request-Id."""
        return f"{PREFILL}{self.prefill}{DECODE}{self.decode}_{self.uuid}"

    def prefill_rank(self, rank: int) -> tuple[str, int]:
        """Return the host and port where that rank of P listens."""
        host, port = split_address(self.prefill)
        return host, port + rank

    def decode_rank(self, rank: int) -> tuple[str, int]:
        host, port = split_address(self.decode)
        return host, port + rank


def wrapped(pair: PairId, index: int = 0, *, chat: bool = False) -> str:
    """Return the id that vLLM's front end makes of `pair`: of prompt `index` of a completion, or of a chat."""
    return f"chatcmpl-{pair.text()}" if chat else f"cmpl-{pair.text()}-{index}"


def parse_request_id(request_id: object) -> tuple[PairId, int]:
    """Return the content of an id, bare or wrapped, and the index of its prompt (0 if it has none). ParamsError if it
    is no such id."""
    problem = bounded_text(request_id, MAX_ID_BYTES)
    if problem or not isinstance(request_id, str):
        raise ParamsError("request_id", problem, _EXPECTED)
    front, prefill_mark, rest = request_id.partition(PREFILL)
    prefill, decode_mark, rest = rest.partition(DECODE)
    decode, _, tail = rest.rpartition("_")
    match = _TAIL.match(tail)
    if not prefill_mark or not decode_mark or match is None or front not in ("", "cmpl-", "chatcmpl-"):
        raise ParamsError("request_id", f"is {shown(request_id)}", _EXPECTED)
    uuid, index = match.groups()
    _split("request_id's prefill address", prefill)
    _split("request_id's decode address", decode)
    return PairId(prefill=prefill, decode=decode, uuid=uuid), int(index or 0)


def _split(field: str, address: object) -> None:
    """Raise ParamsError for a text that is no address, or would not be found again in an id."""
    try:
        if not isinstance(address, str):
            raise AddressError("it is not a string")
        host, _ = split_address(address)
    except AddressError as error:
        raise ParamsError(field, f"is {shown(address)}: {error}", "HOST:PORT") from None
    if "___" in host or not host.isascii():
        raise ParamsError(field, f"is {shown(address)}", "HOST:PORT, whose host is ASCII and has no ___")
