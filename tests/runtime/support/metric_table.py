"""The table of metrics in docs/monitoring.md, as a page of a cluster says that it must be."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

OF_ROUTER = ("pdflow_router_", "pdflow_cluster_", "pdflow_access_log_")
ADDED = frozenset(("engine", "le"))
"""Labels that are not in the table: every sample of the page has the first, and every histogram the second."""


def metric_rows(page: str) -> list[str]:
    """A row for each metric of a page of the whole cluster, by name."""
    rows = []
    for metric in text_string_to_metric_families(page):
        if metric.name.endswith("_created"):
            continue
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        labels = {label for sample in metric.samples for label in sample.labels} - ADDED
        if metric.name == "pdflow_notes":  # a note is exported once it has been emitted
            rows.append(f"| `{name}` | {metric.type} | `note` | engines | {metric.documentation} |")
            continue
        exported_by = {sample.labels["engine"] for sample in metric.samples}
        if metric.name.startswith(OF_ROUTER):
            exported_by = {"router"}
        sources = ["router"] if "router" in exported_by else []
        sources += ["engines"] if exported_by - {"router"} else []
        shown = ", ".join(f"`{label}`" for label in sorted(labels - {"model_name"}))
        rows.append(f"| `{name}` | {metric.type} | {shown} | {', '.join(sources)} | {metric.documentation} |")
    return sorted(rows)


def documented_rows(document: str) -> list[str]:
    """The rows of the table of metrics of a document, but those of stores."""
    table = document.partition("<!-- metrics -->\n")[2].partition("<!-- /metrics -->")[0].splitlines()[2:]
    return [row for row in table if not row.startswith("| `pdflow_store_")]
