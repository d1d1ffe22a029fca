"""Keys are the content and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from pdflow.methods.store.keys import block_keys, chained, home, origin

SHOWN = "from pdflow.methods.store.keys import *; print(block_keys(origin('m', 0, 1), [[1, 2], [3]]))"
BLOCKS = st.lists(st.lists(st.integers(0, 200_000), min_size=1, max_size=4), max_size=6)


def test_every_process_makes_the_same() -> None:
    outputs = {
        subprocess.run(
            [sys.executable, "-c", SHOWN],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("0", "1", "random")
    }
    assert outputs == {f"{block_keys(origin('m', 0, 1), [[1, 2], [3]])}\n"}
    assert len(outputs) == 1


@given(first=BLOCKS, second=BLOCKS)
def test_keys_are_equal_as_far_as_prompts_are(first: list[list[int]], second: list[list[int]]) -> None:
    start = origin("m", 0, 1)
    alike = [a == b for a, b in zip(block_keys(start, first), block_keys(start, second), strict=False)]
    assert alike == [first[: n + 1] == second[: n + 1] for n in range(len(alike))]


def test_whatever_makes_other_bytes_makes_another_key() -> None:
    origins = [origin("m", 0, 1), origin("n", 0, 1), origin("m", 1, 2), origin("m", 0, 2), origin("m", 0, 1, salt=5)]
    keys = {chained(start, [1, 2, 3]) for start in origins}
    assert len(keys) == len(origins)


def test_keys_are_spread_over_the_nodes() -> None:
    start = origin("m", 0, 1)
    homes = [home(chained(start, [number]), 4) for number in range(1000)]
    assert all(200 < homes.count(node) < 300 for node in range(4))


def test_a_key_is_at_the_node_that_its_first_half_names() -> None:
    assert [home(f"{number:016x}" + "f" * 16, 5) for number in (0, 1, 4, 5, 16, 255)] == [0, 1, 4, 0, 1, 0]
