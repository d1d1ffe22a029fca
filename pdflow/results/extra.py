"""The extra `notebook`: what tables and pictures need, and a run does not. Imported only where it is used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pdflow.errors import MissingBackendError


@contextmanager
def notebook_extra() -> Iterator[None]:
    """Around an import of pandas, matplotlib or tqdm: raises MissingBackendError where it is not installed."""
    try:
        yield
    except ModuleNotFoundError as missing:
        raise MissingBackendError(f'{missing.name} is not installed: pip install "pdflow[notebook]"') from None
