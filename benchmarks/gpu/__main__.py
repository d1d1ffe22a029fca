"""Measurements on one GPU: python -m benchmarks.gpu NAME [OPTIONS]

    copies      bandwidth and cost of a piece: on the GPU, to pinned host memory and back
    kernels     of a decode step, by themselves
    attention   over pages, by the size of a block
    decode      a 1B-shaped model against the bandwidth of the memory
    prefill     its prompts
    transfers   bandwidth and cost of a descriptor between two processes, by transport
    overlap     copies to host memory during computation
    identity    the same tokens by every method and way
    deaths      engines killed and stopped with transfers under way
    all         every one, in this order

It needs a CUDA GPU. README.md has the figures; docs/transports.md says how to bring what is needed to a machine without
a network.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Final

from pdflow_runtime.gpu.driver import gpus

NAMES: Final = ("copies", "kernels", "attention", "decode", "prefill", "transfers", "overlap", "identity", "deaths")
TAKE_OPTIONS: Final = ("identity", "deaths")


def main() -> int:
    name, *arguments = sys.argv[1:] or ["--help"]
    if name not in (*NAMES, "all"):
        sys.stdout.write(__doc__ or "")
        return 0 if name in ("-h", "--help") else 2
    if not gpus():
        sys.stderr.write("no GPU found: benchmarks.gpu measures on one\n")
        return 2
    code = 0
    for each in NAMES if name == "all" else (name,):
        main_of = import_module(f"benchmarks.gpu.{each}").main
        code |= main_of(arguments) if each in TAKE_OPTIONS else main_of()
    return code


if __name__ == "__main__":
    sys.exit(main())
