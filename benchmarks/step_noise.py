"""How much do steps of real engines vary? python -m benchmarks.step_noise [--data FOLDER]

From two of LLMServingSim's runs of vLLM (MIT; shared/data/published), which have the times of each request's first and
last token. Tokens of one step have one time, so between two such times lie whole steps, and where no prompt was
computed meanwhile they have the same sequences. Their duration is fitted as a + b * sequences + c * context; how far
the sum of n steps is from n times that, divided by the square root of n, is the standard deviation of one step if steps
vary independently: then it is the same for all n. Only up to 12 steps, since beyond that their number is not certain.

And how much latencies of transfers vary: standard deviation by mean of NCCL's send and receive between two GPUs, from
Vidur's profile (MIT), by size.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from benchmarks.validation.common import ROOT, read_csv

DATA: Final = ROOT.parent / "shared" / "data" / "published"
RUNS: Final = ("RTXPRO6000_Llama-3.1-8B", "RTX4090_Llama-3.1-8B")
MOST_STEPS: Final = 12
FIRST_GUESS: Final = np.array([0.016, 0.0, 1e-7])
"""Seconds per step, per sequence and per token of context: about what reading 16 GB of weights and the KV takes."""
SAME_STEP_S: Final = 1e-3
CERTAIN: Final = 0.35
"""A window whose length is farther from a whole number of steps is left out: it may have had a prompt's step."""
FITS: Final = 30

Floats = npt.NDArray[np.float64]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, default=DATA, help="the folder with the published measurements")
    folder = parser.parse_args(arguments).data
    for run in RUNS:
        lines = (folder / f"llmservingsim_vllm_requests_{run}.jsonl").read_text(encoding="utf-8").splitlines()
        _report_steps(run, windows([json.loads(line) for line in lines]))
    for gpu in ("h100", "a100"):
        _report_links(gpu, read_csv(folder / f"vidur_{gpu}_dgx_send_recv.csv"))
    return 0


def windows(rows: list[dict[str, Any]]) -> Floats:
    """Return [windows, 3]: seconds, sequences and tokens of context of each stretch between two times at which requests
    end, in which no prompt was computed."""
    first = np.array([row["first_token_ts"] for row in rows])
    last = np.array([row["last_token_ts"] for row in rows])
    scheduled = np.array([row["scheduled_ts"] for row in rows])
    prompts = np.array([row["input_toks"] for row in rows])
    answers = np.array([row["output_toks"] for row in rows])
    times = np.unique(np.concatenate([first, last]))
    times = times[np.concatenate([[True], np.diff(times) > SAME_STEP_S])]
    found = []
    for begin, end in pairwise(times):
        # A prompt is computed from when it is scheduled until its first token.
        if ((scheduled < end) & (first > begin)).any():
            continue
        running = (first <= begin) & (last >= end)
        since = (begin - first[running]) / (last[running] - first[running])
        found.append((end - begin, running.sum(), (prompts[running] + since * (answers[running] - 1)).sum()))
    return np.array(found, dtype=np.float64)


def fitted(found: Floats) -> tuple[Floats, Floats]:
    """Return of each window its number of steps, and the duration of one by the fit."""
    shape = np.column_stack([np.ones(len(found)), found[:, 1], found[:, 2]])
    coefficients = FIRST_GUESS
    for _ in range(FITS):
        step = shape @ coefficients
        steps = np.maximum(1, np.round(found[:, 0] / step))
        sure = (np.abs(found[:, 0] / step - steps) < CERTAIN) & (steps <= MOST_STEPS)
        weight = 1 / np.sqrt(steps[sure])
        left, right = shape[sure] * (steps[sure] * weight)[:, None], found[sure, 0] * weight
        coefficients = np.linalg.lstsq(left, right, rcond=None)[0]
    step = shape @ coefficients
    return np.maximum(1, np.round(found[:, 0] / step)), step


def _report_steps(run: str, found: Floats) -> None:
    steps, step = fitted(found)
    print(f"{run}: {len(found)} windows without prompts")
    for low, high in ((1, 1), (2, 4), (5, 8), (9, MOST_STEPS), (1, MOST_STEPS)):
        those = (steps >= low) & (steps <= high)
        off = (found[those, 0] / step[those] - steps[those]) / np.sqrt(steps[those])
        print(f"  {low:2} to {high:2} steps: {those.sum():3} windows, standard deviation of a step {off.std():.1%}")


def _report_links(gpu: str, rows: list[dict[str, str]]) -> None:
    name = "time_stats.send_recv"
    print(f"send and receive, {gpu.upper()}, standard deviation by mean:")
    for low, high in ((0, 1 << 19), (1 << 21, 1 << 24), (1 << 24, 1 << 40)):
        those = [row for row in rows if low <= int(row["size"]) < high and row["devices_per_node"] == "1"]
        spread = median([float(row[f"{name}.std"]) / float(row[f"{name}.mean"]) for row in those])
        print(f"  {low:>8} bytes and more: {len(those):4} sizes, median {spread:.1%}")


if __name__ == "__main__":
    sys.exit(main())
