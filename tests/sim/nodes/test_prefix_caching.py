"""Prompts that begin alike are computed from where they differ: as often as could be, and never more often."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdflow.protocol.effects import PostWrite
from pdflow.results.files.bench_json import bench_json
from pdflow.scenario import ResolvedScenario
from pdflow.workload.build import requests
from pdflow_sim.run import simulate
from tests.sim.support.simulations import (
    RELAXED,
    both_modes_agree,
    costs,
    disturbances,
    everything_ends,
    random_simulations,
    scenarios,
)

HERE = Path(__file__).parents[1]
TRACE = HERE / "../../../shared/data/traces/mooncake_conversation_first2000.jsonl"
NAMED = 512
"""Tokens that one name of a Mooncake trace stands for."""

ROOFLINE = '{ model = "roofline" }'
Row: TypeAlias = dict[str, Any]
Play: TypeAlias = Callable[..., Any]
Traced: TypeAlias = Callable[[Iterable[Row]], dict[str, Any]]

SMALL, ALONE, MIXED = HERE / "small.toml", HERE / "alone.toml", HERE / "mixed.toml"
ONE_OF_EACH = {"pool.p.replicas": 1, "pool.d.replicas": 1, "router.dispatch": "sequential"}
KV_BYTES = 131_072
"""Of one token of Llama-3.1-8B."""


def row(timestamp: int, input_length: int, output_length: int, *hash_ids: int) -> Row:
    return {
        "timestamp": timestamp,
        "input_length": input_length,
        "output_length": output_length,
        "hash_ids": hash_ids,
    }


@pytest.fixture(scope="session")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Traced:
    """Write a trace; what comes back makes a scenario replay it."""
    path = tmp_path_factory.mktemp("prefixes") / "trace.jsonl"

    def write(rows: Iterable[Row]) -> dict[str, Any]:
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        return {"workload": f"{{ trace = {{ path = '{path}', format = 'mooncake' }} }}"}

    return write


def possible(scenario: ResolvedScenario) -> tuple[int, int]:
    """Tokens that could be found, and tokens in all, if nothing is ever forgotten: prompt by prompt, as they arrive."""
    seen: set[int] = set()
    found = tokens = 0
    for request in requests(scenario.workload, scenario.seed, scenario.base_dir):
        full = request.prefix[: request.input_tokens // NAMED]
        here = 0
        while here < len(full) and full[here] in seen and (here + 1) * NAMED < request.input_tokens:
            here += 1
        found += here * NAMED
        tokens += request.input_tokens
        seen.update(full)
    return found, tokens


ENGINES = pytest.mark.parametrize(
    ("file", "overrides"),
    [
        (SMALL, {"pool.p.replicas": 1, "pool.p.cost": ROOFLINE, "pool.d.kv_tokens": 10**8}),
        (ALONE, {"pool.w.cost": ROOFLINE}),
    ],
    ids=["prefill", "aggregated"],
)
"""One engine that computes all prompts."""


def computing_pool(overrides: dict[str, Any]) -> str:
    return "pool.p" if "pool.p.cost" in overrides else "pool.w"


@pytest.mark.parametrize("source", ["a model", "the trace"])
@ENGINES
def test_all_that_can_be_found_is_found(
    play: Play, lay: Callable[..., ResolvedScenario], file: Path, overrides: dict[str, Any], source: str
) -> None:
    """With room for everything one engine finds every beginning that it has had before, however busy it is."""
    workload = '{ requests = 400, like = "mooncake-conversation" }'
    if source == "the trace":
        if not TRACE.exists():
            pytest.skip("the trace is not here: README says where it is published")
        workload = f'{{ requests = 400, trace = {{ path = "{TRACE}", format = "mooncake" }} }}'
    overrides = {**overrides, "workload": workload, f"{computing_pool(overrides)}.kv_tokens": 10**8}
    found, tokens = possible(lay(overrides, file=file))
    assert found > 0.05 * tokens
    assert play(overrides, file=file).prefills[0].prefix_cache() == (tokens, found)


@ENGINES
def test_with_less_room_less_is_found(
    play: Play,
    lay: Callable[..., ResolvedScenario],
    lines: Callable[[Any], bytes],
    file: Path,
    overrides: dict[str, Any],
) -> None:
    overrides = {**overrides, "workload": '{ requests = 300, like = "mooncake-conversation" }'}
    most, tokens = possible(lay(overrides, file=file))
    shares = [most]
    for kv_tokens in (1_000_000, 200_000):
        overrides[f"{computing_pool(overrides)}.kv_tokens"] = kv_tokens
        world = play(overrides, file=file)
        queries, hits = world.prefills[0].prefix_cache()
        assert queries == tokens
        shares.append(hits)
        exact = play(overrides, file=file, exact=True, checked=False)
        assert lines(exact) == lines(world)
        assert exact.prefills[0].prefix_cache() == (queries, hits)
    assert sorted(shares, reverse=True) == shares
    assert 0 < shares[-1] < shares[0]


def test_what_was_found_is_sent_like_the_rest(play: Play, trace: Traced) -> None:
    """A D that remembers nothing gets whole prompts, from the blocks that their beginnings lie in."""
    rows = [row(at, 1600, 2, 7, 8, 9, at) for at in (0, 1000, 2000)]
    world, posted = watched(play, {**trace(rows), "pool.d.enable_prefix_caching": False})
    sources = [write.source for write in posted]
    assert [len(source.blocks) for source in sources] == [100, 100, 100]
    assert len({source.generation for source in sources}) == 3
    assert len({source.blocks[:96] for source in sources}) == 1
    assert len({block for source in sources for block in source.blocks}) == 96 + 3 * 4
    assert world.totals.bytes_moved == 3 * 1600 * KV_BYTES
    assert world.prefills[0].prefix_cache() == (4800, 3072)


def test_what_d_has_is_not_sent(play: Play, trace: Traced) -> None:
    rows = [row(0, 1600, 2, 7, 8, 9, 0), row(1000, 2000, 2, 7, 8, 9, 1), row(2000, 1030, 2, 7, 8, 2)]
    world, posted = watched(play, {**trace(rows), "pool.p.enable_prefix_caching": False})
    assert [(write.registration.token_start, write.registration.num_tokens) for write in posted] == [
        (0, 1600),
        (1536, 464),
        (1024, 6),
    ]
    assert [len(write.registration.target.blocks) for write in posted] == [100, 29, 1]
    assert world.totals.bytes_moved == (1600 + 464 + 6) * KV_BYTES
    assert world.prefills[0].prefix_cache() == (0, 0)
    assert world.decodes[0].prefix_cache() == (4630, 2560)


def watched(play: Play, overrides: dict[str, Any]) -> tuple[Any, list[PostWrite]]:
    """A world that has run, and its WRITEs."""
    posted: list[PostWrite] = []

    def observe(node: str, event: Any, effects: tuple[Any, ...], now: int) -> None:
        posted.extend(effect for effect in effects if type(effect) is PostWrite)

    return play({**overrides, **ONE_OF_EACH}, observe=observe), posted


@pytest.mark.parametrize("on", [True, False])
def test_results_speak_of_it_where_it_did_anything(
    lay: Callable[..., ResolvedScenario], trace: Traced, on: bool
) -> None:
    rows = [row(at, 1100, 2, 7, 8, at) for at in (0, 1000, 2000)]
    overrides = {**trace(rows), **ONE_OF_EACH}
    overrides |= {f"pool.{name}.enable_prefix_caching": on for name in ("p", "d")}
    result = simulate(lay(overrides), quiet=True).result
    body = bench_json(result.header, result.records, result.metrics, result.totals)["pdflow"]
    printed = str(result.table())
    if on:
        assert body["prefix_cache"] == {"queries": 6600, "hits": 4096, "hit_share": 4096 / 6600}
        assert "prefill 62.1 % of 3,300 prompt tokens" in printed
    else:
        assert "prefix_cache" not in body
        assert "prefix hits" not in printed


def test_a_crash_forgets_all_but_the_counts(play: Play, trace: Traced) -> None:
    rows = [row(at, 1100, 2, 7, 8, at) for at in (0, 1000, 2000, 3000)]
    fault = "[{ kind = 'crash', engine = 'w-0', at_s = 1.5, restart_after_s = 0.1 }]"
    world = play({**trace(rows), "fault": fault}, file=ALONE)
    assert set(world.records.outcome) == {"completed"}
    assert world.prefills[0].prefix_cache() == (4400, 2048)


@pytest.mark.parametrize(("block_size", "here"), [(16, 1536), (48, 1536), (96, 1536), (256, 1536), (1024, 1024)])
def test_names_are_taken_together_where_blocks_are_of_another_size(
    play: Play, trace: Traced, block_size: int, here: int
) -> None:
    rows = [row(at, 1600, 2, 7, 8, 9, at) for at in (0, 1000)]
    world = play({**trace(rows), "pool.w.block_size": block_size}, file=ALONE)
    assert world.prefills[0].prefix_cache() == (3200, here)


@st.composite
def prompts(draw: st.DrawFn) -> list[Row]:
    """Prompts that part from a few common beginnings, one here, another there."""
    rows = []
    at = 0
    for index in range(draw(st.integers(1, 20))):
        at += draw(st.sampled_from([0, 0, 1, 5, 40]))
        tokens = draw(st.one_of(st.integers(1, 2600), st.sampled_from([512, 513, 1024, 1536, 1537])))
        branch, fork = draw(st.integers(0, 2)), draw(st.integers(0, 4))
        names = (block if block < fork else 1000 * branch + 100 * fork + block for block in range(-(-tokens // NAMED)))
        full = list(names)
        if tokens % NAMED:
            full[-1] = 1_000_000 + index
        rows.append(row(at, tokens, draw(st.sampled_from([1, 2, 30, 60])), *full))
    return rows


@st.composite
def alike(draw: st.DrawFn, others: Callable[[], st.SearchStrategy[dict[str, Any]]]) -> tuple[dict[str, Any], list[Row]]:
    drawn = draw(others())
    overrides = drawn.get("overrides", drawn)
    rows = draw(prompts())
    del overrides["workload.arrival"], overrides["workload.output_tokens"]
    overrides["workload.requests"] = len(rows)
    if "hangups" in drawn:
        drawn["hangups"] = [(at, request % len(rows)) for at, request in drawn["hangups"]]
    for name in ("p", "w", "d"):
        overrides |= {
            f"pool.{name}.kv_tokens": draw(st.sampled_from([2688, 2880, 8192])),
            f"pool.{name}.max_num_batched_tokens": draw(st.sampled_from([300, 1024, 8192])),
            f"pool.{name}.cost": draw(costs("decode" if name != "p" else "prefill")),
        }
    overrides |= {
        "pool.w.max_num_seqs": draw(st.sampled_from([1, 2, 256])),
        "pool.w.block_size": draw(st.sampled_from([16, 48])),
    }
    return drawn, rows


@random_simulations(100)
@given(drawn=alike(scenarios))
def test_exact_and_fast_are_the_same(
    drawn: tuple[dict[str, Any], list[Row]], play: Play, lines: Callable[[Any], bytes], trace: Traced
) -> None:
    overrides, rows = drawn
    both_modes_agree({**trace(rows), **overrides}, partial(play, file=MIXED), lines)


@pytest.mark.nightly
@settings(max_examples=4_000, deadline=None, suppress_health_check=RELAXED)
@given(drawn=alike(scenarios))
def test_exact_and_fast_are_the_same_at_night(
    drawn: tuple[dict[str, Any], list[Row]], play: Play, lines: Callable[[Any], bytes], trace: Traced
) -> None:
    overrides, rows = drawn
    both_modes_agree({**trace(rows), **overrides}, partial(play, file=MIXED), lines)


@random_simulations(100)
@given(drawn=alike(disturbances))
def test_everything_ends(
    drawn: tuple[dict[str, Any], list[Row]], play: Play, lines: Callable[[Any], bytes], trace: Traced
) -> None:
    disturbed, rows = drawn
    disturbed = {**disturbed, "overrides": {**trace(rows), **disturbed["overrides"]}}
    everything_ends(disturbed, partial(play, file=MIXED), lines)


@pytest.mark.nightly
@settings(max_examples=4_000, deadline=None, suppress_health_check=RELAXED)
@given(drawn=alike(disturbances))
def test_everything_ends_at_night(
    drawn: tuple[dict[str, Any], list[Row]], play: Play, lines: Callable[[Any], bytes], trace: Traced
) -> None:
    disturbed, rows = drawn
    disturbed = {**disturbed, "overrides": {**trace(rows), **disturbed["overrides"]}}
    everything_ends(disturbed, partial(play, file=MIXED), lines)
