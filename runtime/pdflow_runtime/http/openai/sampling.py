"""The options that both APIs share: how tokens are chosen, how many and until when, and what is returned of them.

Ranges are OpenAI's, and vLLM's for what only vLLM has (vllm/sampling_params.py). A field that is null is not there.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec

from pdflow_runtime.http.openai.fields import Fields, decoded, invalid
from pdflow_runtime.http.openai.parameters import Api, refused_fields

MAX_CHOICES: Final = 128
MAX_STOPS: Final = 16
MAX_STOP_CHARACTERS: Final = 1_000
MAX_STOP_TOKENS: Final = 256
MAX_LOGPROBS: Final = 20
MAX_TOKENS: Final = 2**31 - 1
TokenId: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""An integer that may be a token id. Of a list with numbers of thousands of digits, 0.1 ms each, one is parsed."""
SEEDS: Final = (-(2**63), 2**64 - 1)

PENALTIES: Final = (-2, 2)
MOST_REPETITION_PENALTY: Final = 100
BIASES: Final = (-100, 100)
MAX_BAD_WORDS: Final = 128
MAX_BAD_WORD_CHARACTERS: Final = 100
MAX_BIASES: Final = 1_024

_anything: msgspec.json.Decoder[Any] = msgspec.json.Decoder()


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SharedFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of both APIs, with their JSON types."""

    model: str | None = None
    max_tokens: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    min_tokens: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[TokenId, float] | None = None
    allowed_token_ids: list[TokenId] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    user: Any = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    prompt_token_ids: list[TokenId] | None = None
    kv_transfer_params: Any = None
    pdflow: Any = None


class AnswerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of an answer, checked."""

    max_tokens: int | None
    """None: as many as the model's context leaves room for. 0: the prompt alone is returned."""
    min_tokens: int = 0
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: all."""
    min_p: float = 0.0
    seed: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    """The only tokens that may come; None: all."""
    bad_words: tuple[str, ...] = ()
    include_stop: bool = False
    """Whether the text ends with the stop string, or the text of the stop token."""
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    """The number of the prompt's tokens to keep; -1: as many as the model's context leaves room for."""
    keeps_prompt_end: bool = True
    """Whether a truncated prompt keeps its last tokens, not its first ones."""
    echo: bool = False
    """Whether the answer begins with the prompt."""
    logprobs: int | None = None
    """How many of the likeliest tokens to return with each; 0: the chosen token's logprob only; None: no logprobs."""
    stream: bool = False
    include_usage: bool = False
    """Whether a stream ends with an event that holds the usage."""
    continuous_usage: bool = False
    """Whether each event of a stream holds the usage so far."""
    return_token_ids: bool = False

    @property
    def scores_prompt(self) -> bool:
        """Whether the logprobs of the prompt's tokens are wanted: only the engine that computes the prompt has them."""
        return self.echo and self.logprobs is not None

    @property
    def is_constrained(self) -> bool:
        """Whether the next token depends on those before it, or some may not come."""
        rules = (self.frequency_penalty, self.presence_penalty, self.repetition_penalty != 1, self.min_tokens)
        return any(rules) or bool(self.logit_bias or self.bad_words) or self.allowed_token_ids is not None


def asked(fields: SharedFields, max_tokens: int | None, logprobs: int | None, echo: bool = False) -> AnswerOptions:
    """Check the shared part of a request, and return it; `max_tokens` and `logprobs` are checked already.
    OpenAIError."""
    stream = fields.stream or False
    if fields.stream_options is not None and not stream:
        raise invalid("stream_options", "requires stream: true")
    options = fields.stream_options or StreamOptions()
    top_k = fields.top_k or 0
    if echo and logprobs is not None and (max_tokens is None or max_tokens > 1):
        raise invalid("echo", f"with logprobs, max_tokens must be 0 or 1, not {max_tokens}")
    return AnswerOptions(
        max_tokens=max_tokens,
        min_tokens=_min_tokens(fields.min_tokens, max_tokens),
        n=_within("n", fields.n, 1, MAX_CHOICES) or 1,
        stop=_stops(fields.stop),
        stop_token_ids=frozenset(_tokens("stop_token_ids", fields.stop_token_ids or [], MAX_STOP_TOKENS)),
        ignore_eos=fields.ignore_eos or False,
        temperature=_number("temperature", fields.temperature, 0, 2, 1.0),
        top_p=1.0 if fields.top_p is None else _above_zero("top_p", fields.top_p, 1),
        top_k=0 if top_k == -1 else _within("top_k", top_k, 0, MAX_TOKENS) or 0,
        min_p=_number("min_p", fields.min_p, 0, 1, 0.0),
        seed=_within("seed", fields.seed, *SEEDS),
        frequency_penalty=_number("frequency_penalty", fields.frequency_penalty, *PENALTIES, 0.0),
        presence_penalty=_number("presence_penalty", fields.presence_penalty, *PENALTIES, 0.0),
        repetition_penalty=1.0
        if fields.repetition_penalty is None
        else _above_zero("repetition_penalty", fields.repetition_penalty, MOST_REPETITION_PENALTY),
        logit_bias=_biases(fields.logit_bias or {}),
        allowed_token_ids=None if fields.allowed_token_ids is None else _allowed(fields.allowed_token_ids),
        bad_words=_bad_words(fields.bad_words or []),
        include_stop=fields.include_stop_str_in_output or False,
        skip_special_tokens=fields.skip_special_tokens is not False,
        truncate_prompt_tokens=_kept_tokens(fields.truncate_prompt_tokens),
        keeps_prompt_end=fields.truncation_side != "right",
        echo=echo,
        logprobs=logprobs,
        stream=stream,
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.include_usage and options.continuous_usage_stats),
        return_token_ids=fields.return_token_ids or False,
    )


def refuse_what_is_missing_here(fields: Fields, api: Api) -> None:
    """Raise OpenAIError for a field that asks for what this server does not support."""
    refused = refused_fields(api)
    for name in fields:
        if name not in refused:
            continue
        value = decoded(_anything, fields[name], name)
        if value is not None and value not in refused[name].neutral:
            raise refused[name].refusal()


def checked_max_tokens(param: str, count: int | None, least: int = 1) -> int | None:
    return _within(param, count, least, MAX_TOKENS)


def checked_logprobs(param: str, count: int | None) -> int | None:
    return _within(param, count, 0, MAX_LOGPROBS)


def checked_prompt_tokens(param: str, tokens: list[int]) -> tuple[int, ...]:
    """Return the token ids, if they could be a prompt's; whether the model has them is not known here. OpenAIError."""
    if not tokens:
        raise invalid(param, "is empty")
    return _tokens(param, tokens, MAX_TOKENS)


def _within(param: str, value: int | None, least: int, most: int) -> int | None:
    if value is not None and not least <= value <= most:
        raise invalid(param, f"must be from {least} to {most}, not {_short(value)}")
    return value


def _number(param: str, value: float | None, least: float, most: float, default: float) -> float:
    if value is None:
        return default
    if not least <= value <= most:
        raise invalid(param, f"must be from {least:g} to {most:g}, not {value:g}")
    return value


def _above_zero(param: str, value: float, most: float) -> float:
    if not 0 < value <= most:
        raise invalid(param, f"must be above 0 and at most {most:g}, not {value:g}")
    return value


def _min_tokens(count: int | None, max_tokens: int | None) -> int:
    count = _within("min_tokens", count, 0, MAX_TOKENS) or 0
    if max_tokens is not None and count > max_tokens:
        raise invalid("min_tokens", f"must be at most max_tokens ({max_tokens}), not {count}")
    return count


def _kept_tokens(count: int | None) -> int | None:
    if count == 0:
        raise invalid("truncate_prompt_tokens", "must be at least 1, or -1 for as many as fit, not 0")
    return _within("truncate_prompt_tokens", count, -1, MAX_TOKENS)


def _biases(biases: dict[int, float]) -> tuple[tuple[int, float], ...]:
    _tokens("logit_bias", [*biases], MAX_BIASES)
    return tuple((token, _number("logit_bias", bias, *BIASES, 0.0)) for token, bias in biases.items())


def _allowed(tokens: list[int]) -> tuple[int, ...]:
    if not tokens:
        raise invalid("allowed_token_ids", "is empty")
    return tuple(dict.fromkeys(_tokens("allowed_token_ids", tokens, MAX_TOKENS)))


def _bad_words(words: list[str]) -> tuple[str, ...]:
    if len(words) > MAX_BAD_WORDS:
        raise invalid("bad_words", f"at most {MAX_BAD_WORDS} are allowed, not {len(words)}")
    if not all(text.strip() and len(text) <= MAX_BAD_WORD_CHARACTERS for text in words):
        raise invalid("bad_words", f"must have 1 to {MAX_BAD_WORD_CHARACTERS} characters each, not spaces alone")
    return tuple(words)


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS:
        raise invalid("stop", f"at most {MAX_STOPS} are allowed, not {len(stops)}")
    if not all(0 < len(text) <= MAX_STOP_CHARACTERS for text in stops):
        raise invalid("stop", f"must have 1 to {MAX_STOP_CHARACTERS} characters each")
    return stops


def _tokens(param: str, tokens: list[int], most: int) -> tuple[int, ...]:
    if len(tokens) > most:
        raise invalid(param, f"at most {most} are allowed, not {len(tokens)}")
    if tokens and not (min(tokens) >= 0 and max(tokens) <= MAX_TOKENS):
        raise invalid(param, f"token ids must be from 0 to {MAX_TOKENS}")
    return tuple(tokens)


def _short(value: int) -> str:
    return str(value) if abs(value) < 10**30 else "a number of many digits"
