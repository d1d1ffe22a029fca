"""A fixture for tests that run vLLM's classes."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture
def quiet_vllm() -> Iterator[None]:
    """vLLM warns each time a connector is constructed, and logs each failure."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
