"""Measurements on a GPU: `python -m benchmarks.gpu` (README.md has the figures)."""
