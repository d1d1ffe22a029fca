"""The requests of a run as a pandas DataFrame, in the units in which latencies are usually given."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pdflow.results.extra import notebook_extra
from pdflow.results.records import STAGES, Records, stage_durations_ns

if TYPE_CHECKING:
    import pandas as pd


def requests_frame(records: Records, warmup_ns: int = 0) -> pd.DataFrame:
    """Return a table with a row per request. As in the summary, only completed ones have latencies and stages, others
    NaN.

    `warmup` is True for those that arrived during the warm-up, which count in no figure of the summary.
    """
    with notebook_extra():
        import pandas as pd

    arrival, first, last = (
        np.array(column, dtype=np.int64)
        for column in (records.arrival_ns, records.first_token_ns, records.last_token_ns)
    )
    output = np.array(records.output_tokens, dtype=np.int64)
    done = np.array([outcome == "completed" for outcome in records.outcome], dtype=bool)

    def ms(durations_ns: npt.ArrayLike, counted: npt.NDArray[np.bool_] = done) -> npt.NDArray[np.float64]:
        return np.where(counted, np.divide(durations_ns, 1e6), np.nan)

    inter_token = {}
    if records.itl_ns:
        columns = {"itl_ms": records.itl_ns, "itl_max_ms": records.itl_max_ns, "stalled_ms": records.stalled_ns}
        inter_token = {name: ms(column) for name, column in columns.items()}
    classes = {"class": [records.class_of(request) for request in range(len(records))]} if records.classes else {}
    return pd.DataFrame(
        {
            "request": np.arange(len(records)),
            **classes,
            "outcome": [outcome or "unfinished" for outcome in records.outcome],
            "reason": records.reason,
            "attempts": records.attempts,
            "prefill_engine": records.prefill_engine,
            "decode_engine": records.decode_engine,
            "input_tokens": records.input_tokens,
            "output_tokens": output,
            "arrival_s": arrival / 1e9,
            "warmup": arrival < warmup_ns,
            "ttft_ms": ms(first - arrival),
            "tpot_ms": ms((last - first) / np.maximum(output - 1, 1), done & (output > 1)),
            **inter_token,
            "e2e_ms": ms(last - arrival),
            **{f"{stage}_ms": ms(spent) for stage, spent in zip(STAGES, stage_durations_ns(records), strict=True)},
        }
    )
