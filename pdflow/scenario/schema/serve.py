"""The schema of [serve]: a live cluster's addresses, its KV transport, and how its processes authenticate each other.
`simulate` does not read it.

What an engine computes with is its pool's `engine`: the model of [model] in torch, or nothing, in the time that the
scenario's costs say. The other tables, and how to read this class, are in `scenario.py`.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import attrs
from attrs import field

from pdflow.scenario.schema.fields import AT_LEAST_ONE, NOT_EMPTY, TIMER, Bound, field_doc

TransportName: TypeAlias = Literal["shm", "tcp", "nixl", "mooncake", "nccl"]
PORT = Bound(at_least=0, at_most=65_535)
SPARES = Bound(at_least=0, at_most=1000)
TTL = Bound(at_least=1, at_most=1e9)
"""Seconds."""


@attrs.frozen(kw_only=True)
class Serve:
    """[serve]: the addresses, the KV transport and the credentials of a live cluster."""

    host: str = field(
        default="127.0.0.1",
        metadata=field_doc("the address that the router listens on", NOT_EMPTY),
    )
    port: int = field(default=8000, metadata=field_doc("the router's port; 0 for any that is free", PORT))
    engine_host: str = field(
        default="127.0.0.1",
        metadata=field_doc(
            "the address of its machine that an engine listens on, and is reached at by all others", NOT_EMPTY
        ),
    )
    router: str | None = field(
        default=None,
        metadata=field_doc(
            "HOST:PORT at which engines that are started by themselves reach the router; `host` and `port` if absent",
            NOT_EMPTY,
        ),
    )
    spare_engines: int = field(
        default=0,
        metadata=field_doc("engines that may be added to each pool while it serves, beside its replicas", SPARES),
    )
    secret_file: str | None = field(
        default=None,
        metadata=field_doc(
            "file of the secret that all parts share, relative to the scenario file; if absent the environment's "
            "PDFLOW_SECRET, if that is there; needed beyond loopback",
            NOT_EMPTY,
        ),
    )
    tls_cert: str | None = field(
        default=None,
        metadata=field_doc(
            "file of this part's certificate (PEM), relative to the scenario file: ranks then speak TLS to each other",
            NOT_EMPTY,
        ),
    )
    tls_key: str | None = field(
        default=None, metadata=field_doc("file of its key (PEM), relative to the scenario file", NOT_EMPTY)
    )
    tls_ca: str | None = field(
        default=None,
        metadata=field_doc(
            "file of the authority (PEM), relative to the scenario file, whose certificates all peers must show",
            NOT_EMPTY,
        ),
    )
    transport: TransportName = field(
        default="shm",
        metadata=field_doc(
            "what moves KV: memory that the engines of one host share, TCP, NIXL (UCX), Mooncake's Transfer Engine, or "
            "NCCL (without a GPU a stand-in)"
        ),
    )
    store_url: str | None = field(
        default=None,
        metadata=field_doc(
            "kv-store: a Valkey or Redis server, valkey://HOST:PORT, that keeps what the nodes of the store have, so "
            "that it outlives them",
            NOT_EMPTY,
        ),
    )
    store_password_file: str | None = field(
        default=None,
        metadata=field_doc(
            "file of that server's password, relative to the scenario file; if absent the environment's "
            "PDFLOW_STORE_PASSWORD, if that is there",
            NOT_EMPTY,
        ),
    )
    store_ttl_s: float = field(
        default=86_400.0, metadata=field_doc("what is kept in that server goes when it is so old", TTL)
    )
    model: str | None = field(
        default=None,
        metadata=field_doc(
            "folder of a model in the Hugging Face format, relative to the scenario file; if absent a small one of "
            "[model]'s shape is made, with random weights. Where [model] does not say what KV is kept in, the dtype in "
            "its config.json is what torch engines compute in and keep KV in",
            NOT_EMPTY,
        ),
    )
    threads: int = field(default=1, metadata=field_doc("of each engine, for its computations", AT_LEAST_ONE))
    drain_s: float = field(
        default=30.0, metadata=field_doc("when it is told to stop, what has begun has so long to end", TIMER)
    )
