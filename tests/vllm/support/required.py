"""What a test module of the bed needs before it imports anything of vLLM's."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

VERSION = "0.32.0"
MARKS = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("quiet_vllm")]


@contextmanager
def importing_any_vllm() -> Iterator[Any]:
    """Around imports of vLLM, which warn. Skips the module where it is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield pytest.importorskip("vllm", reason="vLLM is not installed")


@contextmanager
def importing_vllm() -> Iterator[None]:
    """Skips the module also where another version is installed than the bed is of."""
    with importing_any_vllm() as vllm:
        if vllm.__version__ != VERSION:
            pytest.skip(f"this is vLLM {vllm.__version__}, the bed is of {VERSION}", allow_module_level=True)
        yield
