"""The schema of [serve]: a live cluster's addresses, its KV transport, and how its processes authenticate each other.
`simulate` does not read it.

What an engine computes with is its pool's `engine`: the model of [model] in torch, or nothing, in the time that the
scenario's costs say. The other tables, and how to read this class, are in `scenario.py`.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import attrs
from attrs import field

from pdflow.scenario.schema.fields import AT_LEAST_ONE, NOT_EMPTY, TIMER, Bound, field_doc

AccessLogFormat: TypeAlias = Literal["off", "text", "json"]
TransportName: TypeAlias = Literal["shm", "tcp", "nixl", "mooncake", "nccl", "cuda-ipc"]
PORT = Bound(at_least=0, at_most=65_535)
SPARES = Bound(at_least=0, at_most=1000)
CONNECTIONS = Bound(at_least=0, at_most=1_000_000)
TTL = Bound(at_least=1, at_most=1e9)
TLS_KEYS: Final = ("tls_cert", "tls_key", "tls_ca")
"""What mutual TLS within the cluster needs, all three."""
"""Seconds."""


@attrs.frozen(kw_only=True)
class Serve:
    """[serve]: the addresses, the KV transport and the credentials of a live cluster."""

    host: str = field(
        default="127.0.0.1",
        metadata=field_doc("address that the router listens on", NOT_EMPTY),
    )
    host_names: tuple[str, ...] = field(
        default=(),
        metadata=field_doc(
            "names by which requests may address the router (their Host header) in addition to IP addresses, "
            "localhost and `host`; other names are refused for /admin, and for all paths on loopback"
        ),
    )
    port: int = field(default=8000, metadata=field_doc("port of the router; 0: any free port", PORT))
    connections: int = field(
        default=4096,
        metadata=field_doc(
            "number of client connections that the router keeps open. When one more client connects, the connection "
            "that went longest without a whole request is closed; an answer is never interrupted",
            AT_LEAST_ONE,
        ),
    )
    connections_per_address: int = field(
        default=2048,
        metadata=field_doc(
            "of these, number of connections of one client address that is not loopback (IPv6: of one /64 network); "
            "0: any number, as behind a proxy on another host",
            CONNECTIONS,
        ),
    )
    cluster_port: int | None = field(
        default=None,
        metadata=field_doc(
            "second port of the router, on `host`, with mutual TLS, for reports of engines, for /admin (which `port` "
            "then refuses) and for all other requests: clients must present a certificate of `tls_ca`. `router` then "
            "names cluster ports. Needs `tls_cert`, `tls_key` and `tls_ca`; 0: any free port",
            PORT,
        ),
    )
    engine_host: str = field(
        default="127.0.0.1",
        metadata=field_doc("address that an engine listens on and at which all other processes reach it", NOT_EMPTY),
    )
    router: str | None = field(
        default=None,
        metadata=field_doc(
            "HOST:PORT at which separately started engines reach the router, or several, separated by commas; "
            "default: `host` and `cluster_port`, or else `port`",
            NOT_EMPTY,
        ),
    )
    spare_engines: int = field(
        default=0,
        metadata=field_doc(
            "number of engines that may be added to each pool at run time, in addition to its replicas", SPARES
        ),
    )
    secret_file: str | None = field(
        default=None,
        metadata=field_doc(
            "file with the secret that all processes share, relative to the scenario file; default: "
            "environment variable PDFLOW_SECRET; required on other than loopback addresses",
            NOT_EMPTY,
        ),
    )
    api_keys_file: str | None = field(
        default=None,
        metadata=field_doc(
            "file with the API keys of clients, one NAME:KEY a line, relative to the scenario file; it is read again "
            "when it changes. Requests then need `Authorization: Bearer KEY`, except for health, /metrics, /version "
            "and /admin. Default: clients are not authenticated",
            NOT_EMPTY,
        ),
    )
    client_tls_cert: str | None = field(
        default=None,
        metadata=field_doc(
            "file with the router's certificate and its chain (PEM), relative to the scenario file; clients then use "
            "https. It is read again when it changes",
            NOT_EMPTY,
        ),
    )
    client_tls_key: str | None = field(
        default=None,
        metadata=field_doc("file with that certificate's key (PEM), relative to the scenario file", NOT_EMPTY),
    )
    tls_cert: str | None = field(
        default=None,
        metadata=field_doc(
            "file with this process's certificate (PEM), relative to the scenario file; connections between ranks, KV "
            "over tcp and requests of the router to engines then use TLS, and with `cluster_port` reports to it. It is "
            "read again when it changes",
            NOT_EMPTY,
        ),
    )
    tls_key: str | None = field(
        default=None,
        metadata=field_doc("file with the certificate's key (PEM), relative to the scenario file", NOT_EMPTY),
    )
    tls_ca: str | None = field(
        default=None,
        metadata=field_doc(
            "file with the certificate authority (PEM), relative to the scenario file; all peers must "
            "present a certificate of it",
            NOT_EMPTY,
        ),
    )
    transport: TransportName = field(
        default="shm",
        metadata=field_doc(
            "transport of KV: shared memory on one host, TCP, NIXL (UCX), Mooncake's Transfer Engine, "
            "NCCL (without a GPU: a stand-in), or CUDA IPC between the GPUs of one host"
        ),
    )
    store_url: str | None = field(
        default=None,
        metadata=field_doc(
            "kv-store: a Valkey or Redis server, valkey://HOST:PORT (valkeys:// with TLS), that keeps the store's "
            "objects when store nodes stop",
            NOT_EMPTY,
        ),
    )
    store_password_file: str | None = field(
        default=None,
        metadata=field_doc(
            "file with that server's password, relative to the scenario file; default: environment variable "
            "PDFLOW_STORE_PASSWORD",
            NOT_EMPTY,
        ),
    )
    store_ttl_s: float = field(default=86_400.0, metadata=field_doc("age at which that server deletes an object", TTL))
    model: str | None = field(
        default=None,
        metadata=field_doc(
            "folder of a model in the Hugging Face format, relative to the scenario file. Without [model], the values "
            "of [model] come from its config.json. If absent, a small model of [model]'s shape is made, with random "
            "weights. Where [model] gives no dtype for KV, torch engines compute in the dtype in config.json and keep "
            "KV in it",
            NOT_EMPTY,
        ),
    )
    access_log: AccessLogFormat = field(
        default="off",
        metadata=field_doc(
            "lines that the router writes to stderr when a request has ended: none, key=value pairs, or JSON"
        ),
    )
    traces: str = field(
        default="off",
        metadata=field_doc(
            "where the router and the engines export OpenTelemetry spans of requests: off; the http:// or https:// URL "
            "of a collector (OTLP); or a file, relative to the scenario file, to which each process appends lines of "
            "OTLP/JSON",
            NOT_EMPTY,
        ),
    )
    threads: int = field(default=1, metadata=field_doc("number of compute threads of each engine", AT_LEAST_ONE))
    drain_s: float = field(
        default=30.0,
        metadata=field_doc(
            "time that running requests have to finish after the cluster receives the signal to stop", TIMER
        ),
    )
