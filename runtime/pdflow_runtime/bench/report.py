"""The results of a benchmark: figures, vLLM's file, our folder. The figures are computed by the code that computes a
simulation's."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import msgspec
import numpy as np

from pdflow.results.command_line import command_line
from pdflow.results.figures import spread
from pdflow.results.figures.itls import bounds_itl, judge_itls
from pdflow.results.figures.metrics import Metrics, completed, measure
from pdflow.results.figures.spread import Spread
from pdflow.results.files.bench_json import ClientMeasurements, RunHeader, bench_date, bench_json
from pdflow.results.files.write import REQUESTS_NAME, RESULTS_NAME, guarding, write_requests, write_results
from pdflow.results.records import Records
from pdflow.results.table import Report
from pdflow.results.totals import NS_PER_S
from pdflow.version import version
from pdflow_runtime.bench.asked import BenchOptions
from pdflow_runtime.bench.ledger import Ledger
from pdflow_runtime.bench.plan import BenchPlan
from pdflow_runtime.clock import wall_s

WORLD: Final = "live"


@attrs.frozen(kw_only=True)
class BenchRun:
    """A run that has ended, or was interrupted."""

    header: RunHeader
    ledger: Ledger
    metrics: Metrics
    late: Spread
    counted: Sequence[int]
    """Requests that count in figures: those that arrived after the warm-up."""

    @staticmethod
    def of(
        asked: BenchOptions, plan: BenchPlan, model: str, ledger: Ledger, command: Sequence[str], interrupted: bool
    ) -> BenchRun:
        header = run_header(asked, plan, model, command, interrupted)
        duration_ns = ledger.clock.now() if interrupted else ledger.last_end_ns
        if bounds_itl(header.slo, header.class_slos):
            itls = (np.array(each, dtype=np.int64) for each in ledger.itls_ns)
            judge_itls(ledger.records, itls, header.slo, header.class_slos)
        metrics = measure(ledger.records, [ledger.tokens], duration_ns, header.slo, header.class_slos, header.warmup_ns)
        late = spread.of_ints(np.array(ledger.late_ns, dtype=np.int64))
        arrivals = enumerate(ledger.records.arrival_ns)
        counted = [number for number, arrival in arrivals if arrival >= header.warmup_ns]
        return BenchRun(header=header, ledger=ledger, metrics=metrics, late=late, counted=counted)

    def table(self) -> Report:
        """Return the report that is printed."""
        return Report(self.header, self.metrics, None, self.late)

    def content(self, asked: BenchOptions) -> Mapping[str, Any]:
        """Return the content of results.json; its lists can be read once."""
        ledger, records = self.ledger, self.ledger.records.arriving_from(self.header.warmup_ns)
        seen = ClientMeasurements(
            queue_times_s=(ledger.queued_ns[number] / NS_PER_S for number in self.counted),
            texts=(ledger.texts[number] for number in self.counted),
            figures=asked.quoted.figures(self._samples_ns(records)),
            late=self.late,
        )
        itls = self._itls_s() if asked.save_detailed else None
        return bench_json(self.header, records, self.metrics, None, itls_s=itls, seen=seen)

    def _itls_s(self) -> Iterator[list[float]]:
        for number in self.counted:
            yield [itl / NS_PER_S for itl in self.ledger.itls_ns[number]]

    def _samples_ns(self, records: Records) -> dict[str, Any]:
        """Return the latencies of completed requests, as metrics.py defines them."""
        served = completed(records)
        done = [number for number in self.counted if self.ledger.records.outcome[number] == "completed"]
        queued = np.array([self.ledger.queued_ns[number] for number in done], dtype=np.int64)
        itls = [np.array(self.ledger.itls_ns[number], dtype=np.int64) for number in done]
        e2el = served.last - served.arrival
        return {
            "ttft": served.first - served.arrival,
            "tpot": served.tpot_ns,
            "itl": np.concatenate(itls) if itls else np.empty(0, dtype=np.int64),
            "e2el": e2el,
            "client_queue_time": queued,
            "e2el_including_client_queue": e2el + queued,
        }

    def save(self, asked: BenchOptions) -> list[Path]:
        """Write the files that the options name, and return their paths. Raises OutputError if the disk refuses; no
        half file is left."""
        written = []
        if asked.out is not None:
            folder = Path(asked.out)
            write_requests(folder / REQUESTS_NAME, self.ledger.records)
            write_results(folder / RESULTS_NAME, self.content(asked))
            written += [folder / RESULTS_NAME, folder / REQUESTS_NAME]
        if asked.save_result:
            path = Path(asked.result_dir or "", asked.result_filename or self.filename())
            (append_result if asked.append_result else write_results)(path, self.content(asked))
            written.append(path)
        return written

    def filename(self) -> str:
        """Return the name that vLLM would give the results file."""
        header = self.header
        rate = "inf" if header.request_rate_rps is None else f"{header.request_rate_rps}"
        most = "" if header.max_concurrency is None else f"-concurrency{header.max_concurrency}"
        model, date = header.model_id.rpartition("/")[2], bench_date(header.source_date_epoch)
        return f"{header.scenario_name}-{rate}qps{most}-{model}-{date}.json"


def append_result(path: Path, content: Mapping[str, Any]) -> None:
    """Append the results to the file as one line of JSON, for --append-result."""
    whole = {key: list(value) if isinstance(value, Iterator) else value for key, value in content.items()}
    with guarding(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(msgspec.json.encode(whole) + b"\n")


def run_header(
    asked: BenchOptions, plan: BenchPlan, model: str, command: Sequence[str], interrupted: bool
) -> RunHeader:
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    return RunHeader(
        scenario_name=plan.name,
        scenario_sha256=plan.sha256,
        seed=plan.seed,
        version=version(),
        command_line=command_line(command),
        world=WORLD,
        backend=asked.backend,
        model_id=model,
        request_rate_rps=plan.rate_rps,
        burstiness=plan.burstiness,
        max_concurrency=plan.max_concurrency,
        source_date_epoch=int(epoch) if epoch and epoch.isdigit() else wall_s(),
        slo=plan.slo,
        class_slos={} if plan.slo is None else plan.slo.classes,
        workload_note=plan.note,
        warmup_ns=round(plan.workload.warmup_s * NS_PER_S),
        interrupted=interrupted,
        metadata=asked.labels,
    )
