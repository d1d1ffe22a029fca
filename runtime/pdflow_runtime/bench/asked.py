"""The options of `pdflow bench`: one field each, named and meant as in `vllm bench serve`, and checked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Final

import attrs
import msgspec

from pdflow.errors import EXIT_BAD_INPUT, PdflowError
from pdflow.results import formatting
from pdflow.results.figures.quoted import LATENCIES, Quoted
from pdflow.scenario.schema.scenario import Slo

GOODPUT: Final = ("ttft", "tpot", "itl", "e2el")
"""What --goodput may bound."""


class AskedError(PdflowError):
    """An option with an invalid value, or one that excludes another option."""

    exit_code = EXIT_BAD_INPUT

    def __init__(self, message: str) -> None:
        super().__init__(formatting.plain(message))


@attrs.frozen(kw_only=True)
class BenchOptions:
    """The command's options."""

    base_url: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    endpoint: str | None = None
    backend: str = "openai"
    model: str | None = None
    header: Sequence[str] = ()
    ready_check_timeout_sec: float = 0.0
    num_warmups: int = 0

    scenario: str | None = None
    overrides: Sequence[str] = ()
    dataset_name: str | None = None
    dataset_path: str | None = None
    columns: Sequence[str] = ()
    num_prompts: int | None = None
    random_input_len: int = 1024
    random_output_len: int = 128
    random_range_ratio: float = 0.0
    request_rate: float | None = None
    burstiness: float = 1.0
    max_concurrency: int | None = None
    seed: int | None = None

    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    extra_body: str | None = None

    percentile_metrics: str = "ttft,tpot,itl"
    metric_percentiles: str = "99"
    goodput: Sequence[str] = ()
    label: str | None = None
    metadata: Sequence[str] = ()
    save_result: bool = False
    save_detailed: bool = False
    append_result: bool = False
    result_dir: str | None = None
    result_filename: str | None = None
    out: str | None = None
    quiet: bool = False

    def __attrs_post_init__(self) -> None:
        if self.save_detailed and not (self.save_result or self.out):
            raise AskedError("--save-detailed needs a file to write: add --save-result or --out DIR")
        if not self.burstiness > 0:
            raise AskedError(f"--burstiness {self.burstiness:g}: expected more than 0")
        if self.request_rate is not None and not self.request_rate > 0:
            raise AskedError(f"--request-rate {self.request_rate:g}: expected more than 0, or inf")
        if not 0 <= self.random_range_ratio < 1:
            raise AskedError(f"--random-range-ratio {self.random_range_ratio:g}: expected from 0 to less than 1")

    @property
    def quoted(self) -> Quoted:
        """The latencies that are reported, and their percentiles."""
        names = tuple(name.strip() for name in self.percentile_metrics.split(",") if name.strip())
        for name in names:
            if name not in LATENCIES:
                raise AskedError(f"--percentile-metrics {name}: expected some of {','.join(LATENCIES)}")
        return Quoted(names, tuple(_percent(text) for text in self.metric_percentiles.split(",") if text.strip()))

    @property
    def slo(self) -> Slo | None:
        """The SLO that --goodput gives; None without one."""
        bounds: dict[str, float] = {}
        for text in self.goodput:
            name, colon, value = text.partition(":")
            value, at, percentile = value.partition("@p")
            bound, share = _number(value), _number(percentile) if at else 99.0
            if name not in GOODPUT or not colon or bound is None or not 0 < bound < math.inf:
                raise AskedError(f"--goodput {text}: expected NAME:MS, where NAME is one of {', '.join(GOODPUT)}")
            if share is None or not 0 < share <= 100 or (at and name != "itl"):
                raise AskedError(f"--goodput {text}: expected a percentile of itl alone, as in itl:50@p95")
            bounds[name] = bound
            if name == "itl":
                bounds["percentile"] = share
        if not bounds:
            return None
        return Slo(
            ttft_ms=bounds.get("ttft"),
            tpot_ms=bounds.get("tpot"),
            itl_ms=bounds.get("itl"),
            itl_percentile=bounds.get("percentile", 99.0),
            e2e_ms=bounds.get("e2el"),
        )

    @property
    def extra(self) -> dict[str, Any]:
        """The fields of --extra-body."""
        if self.extra_body is None:
            return {}
        try:
            return msgspec.json.decode(self.extra_body, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError) as error:
            raise AskedError(f"--extra-body: expected a JSON object: {error}") from None

    @property
    def labels(self) -> dict[str, str]:
        """The pairs of --metadata."""
        pairs = [text.partition("=") for text in self.metadata]
        for name, equals, value in pairs:
            if not equals or not name:
                raise AskedError(f"--metadata {name}{equals}{value}: expected KEY=VALUE")
        return {name: value for name, _, value in pairs}

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling parameters: greedy unless an option says otherwise, so that two runs get the same answers."""
        values = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        return {"temperature": 0.0} | {name: value for name, value in values.items() if value is not None}


def _percent(text: str) -> Fraction:
    value = _number(text)
    if value is None or not 0 <= value <= 100:
        raise AskedError(f"--metric-percentiles {text}: expected numbers from 0 to 100, with commas between them")
    return Fraction(text.strip())


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
