"""The values of a document that are paths of files, relative to the scenario's own.

Moving a scenario to another folder, and finding the files that it depends on, both use this module.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pdflow.scenario.reading.document import is_links_file
from pdflow.scenario.schema.workload import MODELS

SERVED = (
    "model",
    "secret_file",
    "api_keys_file",
    "client_tls_cert",
    "client_tls_key",
    "store_password_file",
    "tls_cert",
    "tls_key",
    "tls_ca",
)
"""The keys of [serve] that are paths."""


def with_paths(document: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """Return a copy of a sound document with every path changed."""
    changed = copy.deepcopy(dict(document))
    for table, key in _path_entries(changed):
        table[key] = change(table[key])
    return changed


def names_paths(document: dict[str, Any]) -> bool:
    """Return whether a sound document has any path."""
    return any(True for _ in _path_entries(document))


def is_traces_file(traces: str) -> bool:
    """Return whether this value of serve.traces is a path, and not `off` or a URL."""
    return traces != "off" and "://" not in traces


def _path_entries(document: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the tables that hold a path, each with its key."""
    trace = document.get("workload", {}).get("trace", {})
    tables = [(trace, "path"), (trace, "dataset"), (document.get("model", {}), "hf_config")]
    tables += [(document.get("transfer", {}), "config")]
    tables += [(document.get("serve", {}), key) for key in SERVED]
    tables += [(pool["cost"], "path") for pool in document.get("pool", []) if "cost" in pool]
    yield from ((table, key) for table, key in tables if key in table)
    if is_traces_file(document.get("serve", {}).get("traces", "off")):
        yield document["serve"], "traces"
    network = document.get("network", {})
    if is_links_file(network.get("preset")):
        yield network, "preset"
    like = document.get("workload", {}).get("like")
    if like is not None and like not in MODELS:
        yield document["workload"], "like"
