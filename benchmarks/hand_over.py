"""How long a hand-over takes: python -m benchmarks.hand_over [--requests N] [--only WORDS] [--transports NAMES]

From the end of a prompt's prefill to the end of its first decode step, one request after the other, through a whole
cluster of one prefill and one decode engine (`pdflow serve --out`, tiny model), by method, transport and length of the
prompt. Medians; the stages are those of a run's report, each from the end of what came last before it to its own:

- d_admit: D's engine has given it blocks (by then it has, where D is asked while P computes);
- handshake, xfer_post, xfer_wire: ranks have met, all is posted, all has landed;
- notify: D knows, and has it in its blocks;
- first_decode: the step that yields the first token, and the wait for it.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import trio

from pdflow.methods.catalogue import METHODS
from pdflow.results.files.write import read_requests
from pdflow.results.records import PREFILL, STAGES
from tests.runtime.support.served import Served, served

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = ROOT / "examples/serve-quickstart.toml"
LENGTHS = (100, 1000, 4000)
FIRST = 2
"""Of each length, that are sent and not counted: ranks meet, pages are touched."""
AFTER = tuple(stage for stage in STAGES[PREFILL + 1 :] if stage != "handoff")


def prompt(number: int, length: int) -> list[int]:
    """No two begin alike: nothing of them is in a prefix cache."""
    return [(number * 7919 + at * 31 + (at * at) % 97) % 500 + 5 for at in range(length)]


async def ask(cluster: Served, requests: int) -> None:
    for number, length in itertools.product(range(FIRST + requests), LENGTHS):
        tokens = prompt(number * len(LENGTHS) + LENGTHS.index(length), length)
        answer = await cluster.ask(prompt=tokens, max_tokens=4, ignore_eos=True, stream=True)
        assert answer.status == 200, answer.body


def spent(row: dict[str, Any]) -> dict[str, float] | None:
    """Milliseconds by stage, after the prefill, and in all; None for what was not completed."""
    ends = row["ends_ns"]
    if row["outcome"] != "completed" or None in (ends["prefill"], ends["first_decode"]):
        return None
    at = ends["prefill"]
    found = {"all": (ends["first_decode"] - at) / 1e6}
    for stage in AFTER:
        end = max(at, ends[stage] or 0)
        found[stage] = (end - at) / 1e6
        at = end
    return found


def measure(method: str, transport: str, requests: int) -> None:
    overrides = (
        f"transfer.method={method}",
        f"serve.transport={transport}",
        "pool.prefill.replicas=1",
        "pool.decode.replicas=1",
        "pool.prefill.max_num_batched_tokens=4096",
    )
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        with served(Path(folder), QUICKSTART, *overrides, out=out) as cluster:
            trio.run(ask, cluster, requests)
        rows = list(read_requests(out / "requests.jsonl"))[FIRST * len(LENGTHS) :]
    for length in LENGTHS:
        found = [it for row in rows if row["input_tokens"] == length and (it := spent(row)) is not None]
        cells = "".join(f"{statistics.median(it[name] for it in found):12.2f}" for name in ("all", *AFTER))
        sys.stdout.write(f"{method:18} {transport:8}{length:7}{len(found):5}{cells}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=20, help="of each length")
    parser.add_argument("--only", default="", metavar="WORDS", help="cases with these words in their names")
    parser.add_argument("--transports", default="shm,tcp,nixl", metavar="NAMES")
    asked = parser.parse_args()
    heads = "".join(f"{name:>12}" for name in ("all, ms", *AFTER))
    sys.stdout.write(f"{'method':18} {'over':8}{'tokens':>7}{'n':>5}{heads}\n")
    selected = set(asked.only.split())
    for method, transport in itertools.product(METHODS, asked.transports.split(",")):
        if not selected or selected <= {method, transport}:
            measure(method, transport, asked.requests)
    return 0


if __name__ == "__main__":
    sys.exit(main())
