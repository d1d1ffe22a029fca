"""The dashboard and the alerts of deploy/ mention what a cluster really exports, before anything has gone wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from pdflow.protocol.values import S
from pdflow_runtime.observe.access_log import AccessLine
from pdflow_runtime.router.cluster_metrics import FRESH_NS
from tests.runtime.support.metric_table import documented_rows, metric_rows
from tests.runtime.support.promql import Samples, problems, selectors
from tests.runtime.support.served import ROOT, Served, served

yaml: Any = pytest.importorskip("yaml", reason="needs PyYAML: pip install 'pdflow[docs]'")

PAGE = (ROOT / "docs/monitoring.md").read_text("utf-8")
REFERENCE = ROOT / "examples/reference.toml"
SMALL = ("pool.prefill.replicas=1", "pool.decode.replicas=1", "serve.access_log=json")
DASHBOARD: dict[str, Any] = msgspec.json.decode((ROOT / "deploy/grafana/pdflow.json").read_bytes())
GROUPS: list[dict[str, Any]] = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text("utf-8"))["groups"]
RULES: list[dict[str, Any]] = [rule for group in GROUPS for rule in group["rules"]]


def expressions() -> Iterator[tuple[str, str]]:
    """Every expression, with the name of its panel or alert."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for rule in RULES:
        yield rule["alert"], rule["expr"]


def test_the_names_in_an_expression_are_found() -> None:
    """What the other tests rely on."""
    samples: Samples = {
        "a:b_total": [{"code": "x", "engine": "router"}],
        "c": [{"engine": "e"}],
        "h_bucket": [{"le": "1"}],
    }
    fine = (
        'histogram_quantile(0.95, sum by (le, instance) (rate(h_bucket{instance=~"$instance"}[5m]))) > 2',
        'sum by (engine) (rate(a:b_total{code=~"x"}[$__rate_interval])) / on (engine) (1 - c{engine!="f"}) > 1e3',
        'up{job="pdflow"} == 0 and c unless c',
    )
    assert [problems(expr, samples) for expr in fine] == [[], [], []]
    assert [each.name for each in selectors(fine[1])] == ["a:b_total", "c"]
    for expr, problem in (
        ("rate(d[5m])", "d is not exported"),
        ('c{code="x"}', "c has no label code"),
        ('a:b_total{code=~"x|y"}', 'a:b_total is never exported with code="y"'),
        ("sum by (stage) (c)", "has the label stage"),
    ):
        assert any(problem in each for each in problems(expr, samples)), expr


def test_the_dashboard_is_whole() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells), "panels overlap"
    assert all(0 <= x < 24 for x, _ in cells)
    for name, expr in expressions():
        assert expr.count("(") == expr.count(")"), name
        assert expr.count("{") == expr.count("}"), name
        assert list(selectors(expr)), name


def test_the_rules_are_whole() -> None:
    names = [rule["alert"] for rule in RULES]
    assert len(set(names)) == len(names)
    for rule in RULES:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}, rule
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "1m")), rule
        assert rule["annotations"]["summary"].count("{{") == rule["annotations"]["summary"].count("}}")
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text("utf-8"))
    assert config["rule_files"] == ["alerts.yml"]
    [job] = config["scrape_configs"]
    assert (job["job_name"], job["metrics_path"]) == ("pdflow", "/metrics/cluster")


def test_the_page_on_monitoring_has_every_alert_and_field() -> None:
    alerts = re.findall(r"^\| (Pdflow\w+) \|", PAGE, re.MULTILINE)
    assert alerts == [rule["alert"] for rule in RULES]
    table = PAGE.partition("| field | meaning |")[2].partition("\n\n")[0]
    fields = [field for row in table.splitlines() for field in re.findall(r"`(\w+)`", row.partition(" | ")[0])]
    assert fields == list(AccessLine.__struct_fields__)
    stores = (ROOT / "runtime/pdflow_runtime/store/state.py").read_text("utf-8")
    documented = {name.removesuffix("_total") for name in re.findall(r"^\| `(pdflow_store_\w+)`", PAGE, re.MULTILINE)}
    assert documented == set(re.findall(r'"(pdflow_store_\w+)"', stores))


async def page_of(cluster: Served) -> str:
    status, page = await cluster.exchange("GET", "/metrics/cluster")
    assert status == 200
    return page.decode()


async def samples_of(cluster: Served) -> Samples:
    found: Samples = {}
    for metric in text_string_to_metric_families(await page_of(cluster)):
        for sample in metric.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    return found


@pytest.mark.slow
@pytest.mark.trio
async def test_a_cluster_exports_what_dashboard_and_rules_mention(tmp_path: Path) -> None:
    with served(tmp_path, REFERENCE, *SMALL) as cluster, trio.fail_after(120):
        before = await samples_of(cluster)
        answers = [await cluster.ask(prompt="hello there", max_tokens=4, stream=stream) for stream in (True, False)]
        assert [answer.status for answer in answers] == [200, 200]
        assert (await cluster.ask(prompt="x", max_tokens=-1)).status == 400
        await trio.sleep(FRESH_NS / S)
        after = await samples_of(cluster)
        for name, expr in expressions():
            assert problems(expr, before) == [], name
            assert problems(expr, after) == [], name
        assert documented_rows(PAGE) == metric_rows(await page_of(cluster))
        assert {labels["engine"] for labels in after["pdflow_cluster_scrape_up"]} == {"prefill-0", "decode-0"}
        for name in ("vllm:cache_config_info", "process_resident_memory_bytes"):
            assert {"prefill-0", "decode-0"} <= {labels["engine"] for labels in after[name]}, name
        [cache] = [labels for labels in after["vllm:cache_config_info"] if labels["engine"] == "decode-0"]
        assert int(cache["num_gpu_blocks"]) > 0
        assert int(cache["block_size"]) > 0
        assert {"p_queue", "prefill", "d_admit", "transfer"} <= {
            labels["stage"] for labels in after["pdflow_request_stage_seconds_count"]
        }
    # The access log is with the other lines on stderr.
    lines = [line for line in cluster.log.read_text("utf-8").splitlines() if line.startswith("{")]
    streamed, whole, refused = (msgspec.json.decode(line) for line in lines)
    assert {"p_queue", "prefill", "d_admit", "transfer"} <= set(streamed["stages_ms"])
    assert (streamed["prefill"], streamed["decode"], streamed["output_tokens"]) == ("prefill-0", "decode-0", 4)
    assert (whole["outcome"], whole["output_tokens"], whole["prompt_tokens"]) == (
        "completed",
        4,
        streamed["prompt_tokens"],
    )
    assert (refused["status"], refused["code"]) == (400, "http_400")
