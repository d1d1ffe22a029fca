"""`vllm-stock` as a configuration: nothing live takes it, every guard is accounted for, and all goes well until it
does not."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pdflow.protocol.dialect import DIALECTS, LIVE_DIALECTS, VLLM_COMPAT, VLLM_STOCK
from tests.protocol.support.counterexamples import NamedCluster
from tests.support.endpoints import engine_info

COMPAT_PAGE = Path(__file__).resolve().parents[2] / "docs" / "compat.md"


def test_nothing_live_takes_stock() -> None:
    assert set(DIALECTS) == {"strict", "vllm-compat", "vllm-stock"}
    assert set(LIVE_DIALECTS) == {"strict", "vllm-compat"}


def test_the_page_lists_every_guard_that_stock_lacks() -> None:
    compat, stock = msgspec.structs.asdict(VLLM_COMPAT), msgspec.structs.asdict(VLLM_STOCK)
    lacks = {guard for guard, value in compat.items() if value is not stock[guard] and guard != "name"}
    rows = [line.split("|") for line in COMPAT_PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    listed = {row[2].strip().strip("`") for row in rows if len(row) == 7 and row[2].strip().startswith("`")}
    assert listed == lacks
    assert not any(stock[guard] for guard in lacks)


def moved(dialect, tps, pulls, first, hit):  # type: ignore[no-untyped-def]
    c = NamedCluster((engine_info("P", tps[0]),), (engine_info("D", tps[1]),), dialect, pulls)
    c.prefill("x")
    if first == "P" or pulls:
        c.finish("x")
    c.decode("r", "x")
    c.admit("r", token_start=hit, num_tokens=64 - hit)
    c.run()
    if first == "D" and not pulls:
        c.finish("x")
        c.run()
    operations = [e for _, e in c.log if type(e).__name__ in ("PostWrite", "PostRead")]
    spans = sorted((e.op.p_rank, e.op.d_rank, e.nbytes, e.notification.count) for e in operations)
    return c.outcomes["r"], c.released, spans


@pytest.mark.parametrize("tps", [(1, 1), (2, 1), (1, 2), (4, 2)], ids=lambda t: f"{t[0]}to{t[1]}")
@pytest.mark.parametrize("pulls", [False, True], ids=["push", "pull"])
@pytest.mark.parametrize("first", ["P", "D"])
@pytest.mark.parametrize("hit", [0, 48])
def test_undisturbed_it_moves_what_compat_moves(tps, pulls, first, hit) -> None:  # type: ignore[no-untyped-def]
    outcome = moved(VLLM_STOCK, tps, pulls, first, hit)
    assert outcome[:2] == (["COMMITTED"], [("x", "NONE")])
    assert outcome == moved(VLLM_COMPAT, tps, pulls, first, hit)
