"""ServeGen's clients: rates, gaps and lengths by time of day, from which requests are drawn.

A client is two files (alibaba/ServeGen data/*/*, Xiang et al., NSDI '26). The trace has no header and a line for each
window of ten minutes: its start in s, requests per s, the gaps' coefficient of variation, the family of their
distribution (Gamma or Weibull) and its shape and scale. The names of these columns are inferred: where gaps are near
those of a Poisson process, rate times the mean gap that shape and scale give is 1 within some per cent, and 1/CV² is
Gamma's shape. The dataset is JSON, {window start: {"input_tokens": "{tokens: share, ...}", "output_tokens": the same}},
with windows of six hours.

Decided here: a window's rate is taken at its word, for it is a count, and its gaps have the shape and not the scale.
Gaps run on from one window to the next, each with the shape of the window it begins in, at the rate of those it passes.
Answers don't depend on prompts, because the files don't say how. A window without lengths has those of the last one
before it that has some, or else of the first. Clients are drawn each from its own streams, and merged.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import merge
from math import exp, lgamma, log
from typing import Annotated, Final, Literal

import attrs
import msgspec

from pdflow.protocol.values import Instant, S
from pdflow.workload.arrivals import FINE_BITS
from pdflow.workload.lengths import empirical
from pdflow.workload.request import Request
from pdflow.workload.rng import Rng, Stream, standard_gamma
from pdflow.workload.traces.complaints import Complaints

WINDOW_S: Final = 600.0
"""The length in s of the window of a trace that has only one."""
_EXPECTED: Final = "expected a window: start s, requests/s, CV, Gamma or Weibull, shape, scale"


@attrs.frozen
class Window:
    """A window of time with one rate and one distribution of gaps."""

    start_s: float
    rate_rps: float
    family: Literal["Gamma", "Weibull", ""]
    shape: float


@attrs.frozen
class ServegenWindow:
    """The length distributions of one window: numbers of tokens and their shares."""

    start_s: float
    input_tokens: tuple[tuple[int, ...], tuple[float, ...]]
    output_tokens: tuple[tuple[int, ...], tuple[float, ...]]


@attrs.frozen
class ServegenClient:
    """One client: its windows in order of time, and its lengths."""

    windows: tuple[Window, ...]
    lengths: tuple[ServegenWindow, ...]

    @property
    def end_s(self) -> float:
        """The end of its last window, which is as long as the one before."""
        last = self.windows[-1].start_s
        return last + (last - self.windows[-2].start_s if len(self.windows) > 1 else WINDOW_S)

    @property
    def requests(self) -> float:
        """The requests that it makes on average."""
        ends = [*(window.start_s for window in self.windows[1:]), self.end_s]
        spans = zip(self.windows, ends, strict=True)
        return sum(window.rate_rps * (end - window.start_s) for window, end in spans)


def read_windows(lines: Iterable[str], location: str) -> tuple[Window, ...]:
    """Read the windows of a trace file. Raises TraceError with every line that is none."""
    complaints = Complaints(location)
    windows: list[Window] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        window = _window(line)
        if window is None:
            complaints.add(number, f"{_EXPECTED}; got {line.strip()[:60]!r}")
        elif windows and window.start_s <= windows[-1].start_s:
            complaints.add(number, f"starts at {window.start_s:g}, expected a time after the line above")
        else:
            windows.append(window)
    if not any(window.rate_rps for window in windows) and not complaints.problems:
        complaints.add(1, f"no window has requests, {_EXPECTED}")
    complaints.raise_any()
    return tuple(windows)


def _window(line: str) -> Window | None:
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != 6:
        return None
    try:
        start, rate, shape = float(cells[0]), float(cells[1]), float(cells[4])
    except ValueError:
        return None
    sound = 0 <= start <= 1e9 and (rate == 0 or (0 < rate <= 1e6 and 0.01 <= shape <= 1e4))
    match cells[3]:
        case ("Gamma" | "Weibull") as family if sound:
            return Window(start, rate, family, shape)
        case "" if sound and rate == 0:
            return Window(start, 0.0, "", 1.0)
    return None


class _Texts(msgspec.Struct):
    input_tokens: str
    output_tokens: str


_Share = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
_Tokens = Annotated[int, msgspec.Meta(ge=0, le=999_999_999)]


def read_lengths(text: str, location: str) -> tuple[ServegenWindow, ...]:
    """Read the lengths of a dataset file. Raises TraceError if it is none."""
    complaints = Complaints(location)
    try:
        windows = msgspec.json.decode(text, type=dict[str, _Texts])
        lengths = [
            ServegenWindow(float(start), _shares(window.input_tokens), _shares(window.output_tokens))
            for start, window in windows.items()
        ]
    except (ValueError, RecursionError, UnicodeError) as error:
        raise complaints.refuse(
            1, f'{error}; expected {{"start s": {{"input_tokens": "{{tokens: share}}", ...}}}}'
        ) from None
    kept = sorted((one for one in lengths if one.input_tokens[0] and one.output_tokens[0]), key=lambda one: one.start_s)
    if not kept or any(not abs(one.start_s) < 1e12 for one in kept):
        raise complaints.refuse(1, "no window has lengths of prompts and of answers")
    return tuple(kept)


def _shares(text: str) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Parse "{143: 0.0001, ...}", as Python writes a dict."""
    keys_quoted = ",".join(_quoted(item) for item in text.strip()[1:-1].split(",") if item.strip())
    found = msgspec.json.decode("{" + keys_quoted + "}", type=dict[_Tokens, _Share])
    if found and not sum(found.values()) > 0:
        raise ValueError("shares that are all 0")
    return tuple(found), tuple(found.values())


def _quoted(item: str) -> str:
    tokens, colon, share = item.partition(":")
    return f'"{tokens.strip()}"{colon}{share}'


def drawn(clients: Sequence[ServegenClient], seed: int) -> Iterator[Request]:
    """Yield the requests of all clients, in order of arrival; they end with the last window."""
    streams = [_client(client, Rng(seed), index) for index, client in enumerate(clients)]
    for index, (at, _, prompt, answer) in enumerate(merge(*streams)):
        yield Request(index, at, max(1, prompt), max(1, answer))


def _client(client: ServegenClient, rng: Rng, number: int) -> Iterator[tuple[Instant, int, int, int]]:
    of_input, of_output = rng.stream(f"input-{number}"), rng.stream(f"output-{number}")
    starts = [round(one.start_s * S) for one in client.lengths]
    draws: dict[int, tuple[Callable[[], int], Callable[[], int]]] = {}
    for at in _instants(client, rng.stream(f"arrivals-{number}")):
        index = max(0, bisect_right(starts, at) - 1)
        if index not in draws:
            one = client.lengths[index]
            draws = {index: (empirical(*one.input_tokens, of_input), empirical(*one.output_tokens, of_output))}
        prompt, answer = draws[index]
        yield at, number, prompt(), answer()


def _instants(client: ServegenClient, stream: Stream) -> Iterator[Instant]:
    """Yield arrivals with gaps of mean 1, each moved to the instant at which the integral of the rate reaches it."""
    ends = [window.start_s for window in client.windows[1:]] + [client.end_s]
    work: float | None = None
    for window, end_s in zip(client.windows, ends, strict=True):
        if not window.rate_rps:
            continue
        gap = _gaps(window, stream)
        fine, end = int(window.start_s * S) << FINE_BITS, int(end_s * S) << FINE_BITS
        per_tick = window.rate_rps / (S << FINE_BITS)
        if work is None:
            work = gap()
        while work <= (end - fine) * per_tick:
            fine += int(work / per_tick)
            yield fine >> FINE_BITS
            work = gap()
        work -= (end - fine) * per_tick


def _gaps(window: Window, stream: Stream) -> Callable[[], float]:
    """Return a function that draws gaps of the window's shape, of mean 1."""
    shape = window.shape
    if window.family == "Gamma":
        return lambda: standard_gamma(shape, stream) / shape
    mean = lgamma(1.0 + 1.0 / shape)
    return lambda: exp(min(700.0, log(-log(stream.uniform())) / shape - mean))
