"""What the hash of a model's weights costs at the first start on a host: GB/s by threads, and per core.

`python -m benchmarks.hash_speed` hashes tensors of the sizes of a 70B Llama's, in one file that is still in memory when
it is hashed, by one thread and by as many as there are cores. A disk that is slower than the cores decides instead.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Final
from unittest.mock import patch

from pdflow_runtime.engines import weight_hash
from pdflow_runtime.engines.weight_hash import hash_weights, threads

SHAPES: Final = {"q": (8192, 8192), "k": (1024, 8192), "up": (28672, 8192), "norm": (8192,)}
MODEL_BYTES: Final = 141e9
"""Llama 3.1 70B in bf16."""


def write(path: Path, nbytes: int) -> None:
    """A file of random bytes, as tensors in bf16."""
    header, at, layer = {}, 0, 0
    while at < nbytes:
        for name, shape in SHAPES.items():
            size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
            header[f"layers.{layer}.{name}"] = {"dtype": "BF16", "shape": shape, "data_offsets": (at, at + size)}
            at += size
        layer += 1
    encoded_header = json.dumps(header).encode()
    block = os.urandom(1 << 24)
    with path.open("wb") as file:
        file.write(len(encoded_header).to_bytes(8, "little") + encoded_header)
        for start in range(0, at, len(block)):
            file.write(block[: at - start])


def speeds(model: Path, cache: Path, count: int, best_of: int) -> tuple[float, float]:
    """Bytes per second of so many threads, and of one core's time."""
    walls, cores = [], []
    with patch.object(weight_hash, "MOST_THREADS", count):
        for turn in range(best_of):
            began, used = time.perf_counter(), time.process_time()
            found = hash_weights(model, cache / f"{count}-{turn}")
            walls.append(found.hashed_bytes / (time.perf_counter() - began))
            cores.append(found.hashed_bytes / (time.process_time() - used))
    return max(walls), max(cores)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=2.0, help="of tensors")
    parser.add_argument("--folder", type=Path, help="where the file is written; a temporary folder if absent")
    parser.add_argument("--best-of", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        model = Path(folder, "model")
        model.mkdir()
        write(model / "model.safetensors", int(args.gb * 1e9))
        print("threads   GB/s   GB/s per core   seconds of a 70B model")
        for count in sorted({1, threads(1 << 20)}):
            wall, core = speeds(model, Path(folder, "cache"), count, args.best_of)
            print(f"{count:7} {wall / 1e9:6.2f} {core / 1e9:15.2f} {MODEL_BYTES / wall:24.0f}")


if __name__ == "__main__":
    main()
