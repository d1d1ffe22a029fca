"""What a test module of the bed needs before it imports anything of vLLM's."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

VERSIONS = ("0.32.0", "0.33.0")
"""Those whose Scheduler the bed drives. Of the second there is no wheel for CPUs: `benchmarks/vllm/newer.sh`."""
MARKS = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("quiet_vllm")]


@contextmanager
def importing_any_vllm() -> Iterator[Any]:
    """Around imports of vLLM, which warn. Skips the module where it is not installed."""
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")  # as which a wheel for CUDA can be imported without a GPU
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield pytest.importorskip("vllm", reason="vLLM is not installed")


@contextmanager
def importing_vllm() -> Iterator[None]:
    """Skips the module also where a version is installed that the bed is not of."""
    with importing_any_vllm() as vllm:
        if vllm.__version__ not in VERSIONS:
            what = f"this is vLLM {vllm.__version__}, the bed is of {' and '.join(VERSIONS)}"
            pytest.skip(what, allow_module_level=True)
        yield
