"""The schema of [network]: NICs, the control channel, and the links and paths between pools.

The other tables, and how to read these classes, are in `scenario.py`.
"""

from __future__ import annotations

import attrs
from attrs import field

from pdflow.scenario.schema.fields import AT_LEAST_ONE, DELAY, NICS, NOT_EMPTY, NOT_NEGATIVE, field_doc


@attrs.frozen(kw_only=True)
class Link:
    """One shared resource on a path, such as a switch port or an uplink."""

    name: str = field(metadata=field_doc("name that `paths` refers to", NOT_EMPTY))
    bandwidth_bytes_per_s: int | None = field(
        metadata=field_doc("capacity, shared max-min fairly; inf: unlimited (None in Python)", AT_LEAST_ONE, rate=True)
    )
    latency_s: float = field(default=0.0, metadata=field_doc("latency that the link adds", DELAY))


@attrs.frozen(kw_only=True)
class LinkPath:
    """The links on the way from one pool to another, in addition to the two NICs."""

    from_pool: str = field(metadata=field_doc("name of the sending pool", NOT_EMPTY, key="from"))
    to_pool: str = field(metadata=field_doc("name of the receiving pool", NOT_EMPTY, key="to"))
    via: tuple[str, ...] = field(metadata=field_doc("names of the links, in order", NOT_EMPTY))


@attrs.frozen(kw_only=True)
class Network:
    """[network]: the NICs of each GPU, the control channel, and explicit links. A preset supplies what is not said."""

    preset: str = field(
        default="rdma-400g",
        metadata=field_doc(
            "name of a link preset, or path of a .toml file in the same form, such as the links.toml of "
            "`pdflow calibrate`"
        ),
    )
    bandwidth_bytes_per_s: int | None = field(
        metadata=field_doc(
            "bandwidth of each NIC in each direction; inf: unlimited (None in Python)",
            AT_LEAST_ONE,
            preset=True,
            rate=True,
        )
    )
    nics_per_rank: int = field(
        default=1,
        metadata=field_doc(
            "number of NICs near each GPU; transfers use them in turn, or are sliced over all of them", NICS
        ),
    )
    slice_bytes: int = field(
        default=0,
        metadata=field_doc(
            "larger transfers are cut into slices of this size, which are spread over the NICs; 0: no slices",
            NOT_NEGATIVE,
        ),
    )
    per_slice_s: float = field(
        default=0.0,
        metadata=field_doc(
            "time that a NIC's queue needs for each slice; the NIC moves slices at the slower of this and "
            "the bandwidth",
            DELAY,
        ),
    )
    latency_s: float = field(metadata=field_doc("one-way latency between two NICs", DELAY, preset=True))
    per_message_s: float = field(metadata=field_doc("time to post one transfer", DELAY, preset=True))
    per_descriptor_s: float = field(
        metadata=field_doc("additional posting time for each descriptor", DELAY, preset=True)
    )
    coalesce: bool | None = field(
        default=None,
        metadata=field_doc(
            "blocks that are adjacent at P and at D become one descriptor; otherwise each block has its own; "
            "default: the connector's"
        ),
    )
    control_latency_s: float = field(metadata=field_doc("one-way latency of a control message", DELAY, preset=True))
    handshake_s: float = field(
        metadata=field_doc("duration of a handshake between two ranks, in each direction", DELAY, preset=True)
    )
    warm: bool = field(
        default=True,
        metadata=field_doc(
            "all ranks have completed their handshakes before the first request, and handshakes of a restarted engine "
            "begin at its restart; false: handshakes begin at first contact"
        ),
    )
    http_latency_s: float = field(metadata=field_doc("one-way latency of one HTTP hop", DELAY, preset=True))
    poll: bool = field(
        metadata=field_doc(
            "whether a polling protocol sees messages only at its next poll, as vLLM does once per engine step",
            preset=True,
        )
    )
    links: tuple[Link, ...] = field(default=(), metadata=field_doc("shared links, such as uplinks"))
    paths: tuple[LinkPath, ...] = field(default=(), metadata=field_doc("the links between each two pools"))
