"""The version of pdflow that is installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from importlib.util import find_spec


def version() -> str:
    """Return the version, such as "0.1.0"; "unknown" in a checkout that is not installed."""
    try:
        return installed("pdflow")
    except PackageNotFoundError:
        return "unknown"


def compiled() -> bool:
    """True if the packages that a run spends its time in were compiled to C at installation (setup.py)."""
    engine = find_spec("pdflow.engine.engine")
    return engine is not None and not str(engine.origin).endswith(".py")
