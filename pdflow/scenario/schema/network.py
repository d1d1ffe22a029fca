"""The schema of [network]: NICs, the control channel, and the links and paths between pools.

The other tables, and how to read these classes, are in `scenario.py`.
"""

from __future__ import annotations

import attrs
from attrs import field

from pdflow.scenario.schema.fields import AT_LEAST_ONE, DELAY, NICS, NOT_EMPTY, NOT_NEGATIVE, field_doc


@attrs.frozen(kw_only=True)
class Link:
    """One shared resource on a path: a switch port, an uplink."""

    name: str = field(metadata=field_doc("name that paths refer to", NOT_EMPTY))
    bandwidth_bytes_per_s: int | None = field(
        metadata=field_doc("capacity, shared max-min fairly; inf is unlimited (None)", AT_LEAST_ONE, rate=True)
    )
    latency_s: float = field(default=0.0, metadata=field_doc("delay that it adds", DELAY))


@attrs.frozen(kw_only=True)
class LinkPath:
    """What bytes between two pools pass, besides the two NICs."""

    from_pool: str = field(metadata=field_doc("pool that sends", NOT_EMPTY, key="from"))
    to_pool: str = field(metadata=field_doc("pool that receives", NOT_EMPTY, key="to"))
    via: tuple[str, ...] = field(metadata=field_doc("names of links, in order", NOT_EMPTY))


@attrs.frozen(kw_only=True)
class Network:
    """[network]: the NICs of each GPU, the control channel, and explicit links. A preset supplies what is not said."""

    preset: str = field(
        default="rdma-400g",
        metadata=field_doc("a link preset's name, or the path of a .toml like them, as `pdflow calibrate` writes it"),
    )
    bandwidth_bytes_per_s: int | None = field(
        metadata=field_doc("each NIC, each direction; inf is unlimited (None)", AT_LEAST_ONE, preset=True, rate=True)
    )
    nics_per_rank: int = field(
        default=1,
        metadata=field_doc("NICs near each GPU; transfers take them in turn, or are cut over all of them", NICS),
    )
    slice_bytes: int = field(
        default=0,
        metadata=field_doc("what is larger is cut into slices, dealt over the NICs; 0: nothing is cut", NOT_NEGATIVE),
    )
    per_slice_s: float = field(
        default=0.0, metadata=field_doc("each slice on its NIC's queue, beside its time on the wire", DELAY)
    )
    latency_s: float = field(metadata=field_doc("one way, between two NICs", DELAY, preset=True))
    per_message_s: float = field(metadata=field_doc("posting one transfer", DELAY, preset=True))
    per_descriptor_s: float = field(metadata=field_doc("each descriptor of a transfer", DELAY, preset=True))
    coalesce: bool = field(
        default=False,
        metadata=field_doc("blocks that follow each other at P and at D are one descriptor; else each is its own"),
    )
    control_latency_s: float = field(metadata=field_doc("one control message, one way", DELAY, preset=True))
    handshake_s: float = field(metadata=field_doc("first contact of two engines", DELAY, preset=True))
    http_latency_s: float = field(metadata=field_doc("one hop of HTTP, one way", DELAY, preset=True))
    poll: bool = field(metadata=field_doc("whether what a protocol polls waits for the poll", preset=True))
    links: tuple[Link, ...] = field(default=(), metadata=field_doc("shared resources"))
    paths: tuple[LinkPath, ...] = field(default=(), metadata=field_doc("which pools' bytes pass which links"))
