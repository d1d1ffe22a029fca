"""The extra `notebook`: the packages that tables and plots need and a run does not. Imported only where used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pdflow.errors import MissingBackendError


@contextmanager
def notebook_extra() -> Iterator[None]:
    """Raise MissingBackendError if an import in the block fails: pandas, matplotlib, tqdm or ipywidgets is missing."""
    try:
        yield
    except ModuleNotFoundError as missing:
        raise MissingBackendError(f'{missing.name} is not installed: pip install "pdflow[notebook]"') from None
