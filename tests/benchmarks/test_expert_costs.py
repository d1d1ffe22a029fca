"""The roofline of mixtures of experts agrees with NVIDIA's kernel tables as far as its docstring says."""

from __future__ import annotations

from statistics import fmean
from unittest.mock import patch

from benchmarks.expert_costs import errors, experts, larger


def mean_error() -> float:
    return fmean(abs(error) for case in errors() for error in case)


def test_experts_take_longer_than_dense_layers() -> None:
    assert mean_error() < 0.12
    with patch.object(experts, "_experts", larger):
        assert mean_error() > 0.2
