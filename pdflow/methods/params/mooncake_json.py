"""mooncake.json, the file that MOONCAKE_CONFIG_PATH names, as Mooncake's guides write it.

Three readers share that name, and the keys of a file show its reader: V0's pipe has `prefill_url` and
`decode_url`, the store connectors `master_server_address`; of these V0's needs `local_hostname`, which 0.32.0's no
longer reads.

`metadata.py` decides which metadata servers are accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple, TypeAlias

import attrs

from pdflow.methods.params.address import split_address
from pdflow.methods.params.errors import ParamsError
from pdflow.methods.params.fields import UNREAD, Kind, param, structure, unread_keys
from pdflow.methods.params.metadata import SERVER, metadata_url_of
from pdflow.methods.params.settings import ADDRESS, MAYBE_EMPTY, TEXT, TRUTH, choice, loaded, size

LOCATION: Final = "mooncake.json"
PORTS_APART: Final = 50
"""Least distance of the two base ports on one host that Mooncake's guide asks for: each rank takes several above its
base."""
MAX_RANKS: Final = 64
"""The most ranks of an engine whose ports are compared."""
DECODE_SHIFT: Final = 100
"""Added to decode's port where both urls are the same, by V0 itself."""

DEVICES: Final = Kind(expected="NIC names, separated by commas, or an empty string", problem=MAYBE_EMPTY.problem)
PROTOCOLS: Final = ("tcp", "rdma")
PROTOCOL: Final = choice(*PROTOCOLS)


def devices_of(device_name: str) -> tuple[str, ...]:
    """Return the NICs that a text with commas names."""
    return tuple(name for field in device_name.split(",") if (name := field.strip()))


class Ports(NamedTuple):
    """The ports on which one rank of one side listens."""

    engine: int
    data: int
    ack: int


@attrs.frozen(kw_only=True)
class Mooncake:
    """The keys that the three kinds of file share."""

    metadata_server: str = param(SERVER, "where segments are looked up")
    device_name: str = param(DEVICES, "NICs for rdma", default="")
    unread: tuple[str, ...] = param(UNREAD, "keys that pdflow does not read", default=())

    @property
    def devices(self) -> tuple[str, ...]:
        return devices_of(self.device_name)


@attrs.frozen(kw_only=True)
class PipeFile(Mooncake):
    """V0's pipe, the same file on both sides."""

    prefill_url: str = param(ADDRESS, "P's engine, rank 0")
    decode_url: str = param(ADDRESS, "D's engine, rank 0")
    metadata_backend: str | None = param(
        TEXT, "kind of the metadata server, if its address does not name one", default=None
    )
    protocol: str = param(PROTOCOL, "protocol of the Transfer Engine", default="tcp")

    def __attrs_post_init__(self) -> None:
        metadata_url_of(self.metadata_server, self.metadata_backend)
        self.check_ranks(1)
        if self.decode_port > 65_535:
            raise ParamsError("decode_url", f"gets the port {self.decode_port}", "ports of at most 65,435")

    @property
    def decode_port(self) -> int:
        """D's base port, after the shift."""
        return split_address(self.decode_url)[1] + (DECODE_SHIFT if self.prefill_url == self.decode_url else 0)

    @property
    def ports_apart(self) -> int | None:
        """The distance of the two base ports, None on two hosts."""
        (p_host, p_port), (d_host, _) = split_address(self.prefill_url), split_address(self.decode_url)
        return abs(self.decode_port - p_port) if p_host == d_host else None

    @property
    def room(self) -> int:
        """How many ranks of P and of D have ports of their own, at most MAX_RANKS."""
        if self.ports_apart is None:
            return MAX_RANKS
        of_p: set[int] = set()
        of_d: set[int] = set()
        for rank in range(MAX_RANKS):
            of_p.update(self.prefill_ports(rank))
            of_d.update(self.decode_ports(rank))
            if of_p & of_d:
                return rank
        return MAX_RANKS

    def check_ranks(self, ranks: int) -> None:
        """Check that each of these ranks of P and of D has ports of its own, which V0 fails to bind otherwise."""
        if ranks > self.room:
            raise ParamsError(
                "decode_url",
                f"has a port {self.ports_apart} from prefill_url's, on the same host: ports of {self.room} ranks fit "
                f"between, and engines have {ranks}",
                f"at least {PORTS_APART} between them, or the same port, to which {DECODE_SHIFT} is added",
            )

    def prefill_ports(self, rank: int) -> Ports:
        return _ports(split_address(self.prefill_url)[1], rank)

    def decode_ports(self, rank: int) -> Ports:
        return _ports(self.decode_port, rank)

    @property
    def metadata_url(self) -> str | None:
        """The URL of the metadata server; None where peers shake hands."""
        return metadata_url_of(self.metadata_server, self.metadata_backend)


@attrs.frozen(kw_only=True)
class StoreBase(Mooncake):
    """The keys that the files of both store connectors share."""

    master_server_address: str = param(ADDRESS, "mooncake_master's RPC")

    def __attrs_post_init__(self) -> None:
        metadata_url_of(self.metadata_server, None)

    @property
    def metadata_url(self) -> str | None:
        """The URL of the metadata server; None where peers shake hands."""
        return metadata_url_of(self.metadata_server, None)


@attrs.frozen(kw_only=True)
class StoreV0File(StoreBase):
    """V0's store connector."""

    local_hostname: str = param(TEXT, "name of this node")
    protocol: str = param(PROTOCOL, "protocol of the Transfer Engine", default="tcp")
    global_segment_size: int = param(size(0, units=True), "bytes that this node gives the store", default=3_355_443_200)
    local_buffer_size: int = param(size(1, units=True), "bytes for transfers", default=1 << 30)


@attrs.frozen(kw_only=True)
class StoreFile(StoreBase):
    """vLLM 0.32.0's store connector."""

    protocol: str = param(PROTOCOL, "protocol of the Transfer Engine", default="rdma")
    mode: str = param(
        choice("embedded", "standalone-store"), "embedded: each rank gives the store memory", default="embedded"
    )
    global_segment_size: int = param(size(0, units=True), "bytes that each rank gives the store", default=4 << 30)
    local_buffer_size: int = param(size(1, units=True), "bytes for transfers", default=4 << 30)
    enable_offload: bool = param(TRUTH, "the store offloads to SSDs", default=False)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.mode == "standalone-store" and self.global_segment_size:
            wrong = f"is {self.global_segment_size}"
            raise ParamsError(
                "global_segment_size", wrong, "0 in standalone-store, where ranks give the store no memory"
            )


File: TypeAlias = PipeFile | StoreV0File | StoreFile


def read_mooncake_json(source: object) -> File:
    """Read the file from a JSON text, or from the object that it holds. ParamsError for the first thing wrong."""
    found = loaded(source, LOCATION)
    kind = _kind(found)
    return structure(kind, {**found, "unread": unread_keys(found, kind)}, location=LOCATION)


def _kind(found: Mapping[Any, Any]) -> type[File]:
    if "prefill_url" in found or "decode_url" in found:
        return PipeFile
    if "local_hostname" in found:
        return StoreV0File
    if "master_server_address" in found:
        return StoreFile
    raise ParamsError(LOCATION, "is not a known kind of file", "prefill_url and decode_url, or master_server_address")


def _ports(base: int, rank: int) -> Ports:
    """Return the ports of a rank in V0: the engine at base + rank; ZMQ beyond the first eight, two for each rank."""
    return Ports(base + rank, base + 8 + 2 * rank + 1, base + 8 + 2 * rank + 2)
