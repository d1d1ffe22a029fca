"""A run is a function of scenario and seed: the same bytes in another process, under another hash seed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = Path(__file__).parent / "small.toml"
BUSY = (
    "pool.p.tp=2", "pool.d.tp=4", "network.preset=rdma-400g", "workload.requests=60", "pool.d.kv_tokens=256",
    "router.policy=least-loaded",
)  # fmt: skip


def simulate(out: Path, *args: str, hash_seed: int = 0, epoch: int | None = 1_700_000_000) -> dict[str, bytes]:
    """Run the command in a process of its own; its files by name."""
    env = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
    env.pop("SOURCE_DATE_EPOCH", None)
    if epoch is not None:
        env["SOURCE_DATE_EPOCH"] = str(epoch)
    command = [sys.executable, "-m", "pdflow", "simulate", *args, "--quiet", "--out", str(out)]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {path.name: path.read_bytes() for path in sorted(out.iterdir())}


@pytest.mark.parametrize(
    "overrides",
    [(), ("transfer.method=nixl-pull", "transfer.dialect=vllm-compat", "router.dispatch=sequential")],
    ids=["push", "pull"],
)
def test_the_same_bytes_under_any_hash_seed(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    args = [str(SMALL), "--events", "--save-detailed"]
    for override in (*BUSY, *overrides):
        args += ["--set", override]
    first = simulate(tmp_path / "a", *args, hash_seed=1)
    assert set(first) == {"results.json", "requests.jsonl", "events.jsonl", "scenario.toml"}
    assert simulate(tmp_path / "b", *args, hash_seed=2) == first


def test_the_date_is_the_source_date_epoch(tmp_path: Path) -> None:
    results = json.loads(simulate(tmp_path / "a", str(SMALL), epoch=86_400)["results.json"])
    assert results["date"] == "19700102-000000"
    results = json.loads(simulate(tmp_path / "b", str(SMALL), epoch=None)["results.json"])
    assert results["date"] == "19700101-000000"


def test_other_seeds_differ(tmp_path: Path) -> None:
    first = simulate(tmp_path / "a", str(SMALL), "--seed", "1")
    assert simulate(tmp_path / "b", str(SMALL))["requests.jsonl"] == first["requests.jsonl"]
    assert simulate(tmp_path / "c", str(SMALL), "--seed", "2")["requests.jsonl"] != first["requests.jsonl"]
