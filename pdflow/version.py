"""The version of this pdflow, as its installation says."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed


def version() -> str:
    """Such as "0.1.0"; "unknown" in a checkout that is not installed."""
    try:
        return installed("pdflow")
    except PackageNotFoundError:
        return "unknown"
