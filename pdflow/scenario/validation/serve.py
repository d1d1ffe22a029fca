"""The rules between the keys of [serve] and of [transfer]."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from pdflow.methods.catalogue import METHODS
from pdflow.scenario.reading.convert import Complaint
from pdflow.scenario.schema.serve import TLS_KEYS, Serve
from pdflow.scenario.schema.transfer import Transfer
from pdflow.scenario.store_url import read_store_url

_COLLECTOR: Final = re.compile(r"https?://[^\s/@?#]+(?:/[^\s@?#]*)?")


def check_serve(serve: Serve, transfer: Transfer | None) -> Iterator[Complaint]:
    """Check the cluster port; and a store's URL, and that the store keeps blocks after their prompts end: only these
    are looked up at a server. Methods without a store ignore the URL, as every other key of a store."""
    yield from _check_cluster_port(serve)
    if "://" in serve.traces and not _COLLECTOR.fullmatch(serve.traces):
        expected = "off, a file, or http://HOST:PORT of a collector; credentials go into OTEL_EXPORTER_OTLP_HEADERS"
        yield Complaint(("serve", "traces"), f"is {serve.traces!r}, expected {expected}")
    if serve.store_url is None:
        return
    try:
        read_store_url(serve.store_url)
    except ValueError as error:
        yield Complaint(("serve", "store_url"), str(error))
    if transfer is None or not METHODS[transfer.method].stores:
        return
    needs = "serve.store_url: the server keeps blocks only"
    if transfer.store_granularity != "block":
        yield Complaint(("transfer", "store_granularity"), f'is "prompt", expected "block" with {needs}')
    if not transfer.store_keep:
        yield Complaint(("transfer", "store_keep"), f"is false, expected true with {needs}")


def _check_cluster_port(serve: Serve) -> Iterator[Complaint]:
    """Check that the cluster port has certificates, and is not the port for clients."""
    at = ("serve", "cluster_port")
    if serve.cluster_port is None:
        return
    if missing := [f"serve.{key}" for key in TLS_KEYS if getattr(serve, key) is None]:
        yield Complaint(at, f"needs TLS within the cluster: set {', '.join(missing)} too (docs/hosts.md)")
    if serve.cluster_port == serve.port != 0:
        yield Complaint(at, f"is {serve.cluster_port}, which is serve.port, the port for clients; expected another one")
