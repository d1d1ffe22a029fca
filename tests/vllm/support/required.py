"""What a test module of the bed needs before it imports anything of vLLM's."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

VERSION = "0.32.0"
MARKS = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("quiet_vllm")]


@contextmanager
def importing_vllm() -> Iterator[None]:
    """Around imports of vLLM, which warn. Skips the module where the version that the bed is of is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        vllm = pytest.importorskip("vllm", reason="vLLM is not installed")
        if vllm.__version__ != VERSION:
            pytest.skip(f"this is vLLM {vllm.__version__}, the bed is of {VERSION}", allow_module_level=True)
        yield
