"""The model that the instances serve: tiny random weights, on disk, the same for the same seed.

The weights are those of pdflow's own tiny Llama (hidden 256, 4 layers, 4 query and 2 KV heads of 64, vocabulary 512).
Fewer positions than there keep vLLM's start short.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Final

MAX_MODEL_LEN: Final = 2048
VOCABULARY: Final = 512
FIRST_TOKEN: Final = 2
"""Ids below are the beginning and the end of a text."""


def write_model(folder: Path, seed: int = 0) -> Path:
    """Write the model of this seed below `folder`, unless it is there, and return its path."""
    path = folder / f"tiny-llama-{seed}"
    if not (path / "config.json").is_file():
        from pdflow_runtime.engines.tiny import tiny_model  # imports torch: seconds, and only the first time

        tiny_model(path, seed, max_position_embeddings=MAX_MODEL_LEN)
    return path


def prompt(tokens: int, seed: int | str) -> list[int]:
    """Return a random prompt of so many token ids, the same for the same seed."""
    random = Random(f"{seed}/{tokens}")
    return [random.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(tokens)]
