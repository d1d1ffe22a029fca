"""Edits of a scenario that several commands make, by dotted key."""

from __future__ import annotations

from typing import Any

from pdflow.scenario.schema.network import Link, Network


def faster_network(network: Network, times: float) -> dict[str, Any]:
    """Return the edits that give all NICs and links that have a limit `times` the bandwidth; none if there is none."""
    edits: dict[str, Any] = {}
    if network.bandwidth_bytes_per_s is not None:
        edits["network.bandwidth_bytes_per_s"] = max(1, int(network.bandwidth_bytes_per_s * times))
    if any(link.bandwidth_bytes_per_s is not None for link in network.links):
        edits["network.links"] = [_faster(link, times) for link in network.links]
    return edits


def _faster(link: Link, times: float) -> dict[str, Any]:
    rate = link.bandwidth_bytes_per_s
    faster = "inf" if rate is None else max(1, int(rate * times))
    return {"name": link.name, "bandwidth_bytes_per_s": faster, "latency_s": link.latency_s}
