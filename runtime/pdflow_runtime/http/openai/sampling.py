"""The options that both APIs share: how tokens are chosen, how many and until when, and what is returned of them.

Ranges are OpenAI's, and vLLM's for what only vLLM has (vllm/sampling_params.py). A field that is null is not there.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from pdflow_runtime.http.openai.fields import Fields, decoded, invalid

MAX_CHOICES: Final = 128
MAX_STOPS: Final = 16
MAX_STOP_CHARACTERS: Final = 1_000
MAX_STOP_TOKENS: Final = 256
MAX_LOGPROBS: Final = 20
MAX_TOKENS: Final = 2**31 - 1
SEEDS: Final = (-(2**63), 2**64 - 1)

NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "use_beam_search": (False,),
    "prompt_logprobs": (),
    "prompt_embeds": (),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}
"""Fields that would change the answer and are not supported, with the values that have no effect. Null never has."""

_anything: msgspec.json.Decoder[Any] = msgspec.json.Decoder()


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


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
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    prompt_token_ids: list[int] | None = None
    kv_transfer_params: Any = None
    pdflow: Any = None


class AnswerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of an answer, checked."""

    max_tokens: int | None
    """None: as many as the model's context leaves room for."""
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: all."""
    seed: int | None = None
    logprobs: int | None = None
    """How many of the likeliest tokens to return with each; 0: the chosen token's logprob only; None: no logprobs."""
    stream: bool = False
    include_usage: bool = False
    """Whether a stream ends with an event that holds the usage."""
    return_token_ids: bool = False


def asked(fields: SharedFields, max_tokens: int | None, logprobs: int | None) -> AnswerOptions:
    """Check the shared part of a request, and return it; `max_tokens` and `logprobs` are checked already.
    OpenAIError."""
    if fields.stream_options is not None and not fields.stream:
        raise invalid("stream_options", "requires stream: true")
    top_k = fields.top_k or 0
    return AnswerOptions(
        max_tokens=max_tokens,
        n=_within("n", fields.n, 1, MAX_CHOICES) or 1,
        stop=_stops(fields.stop),
        stop_token_ids=frozenset(_tokens("stop_token_ids", fields.stop_token_ids or [], MAX_STOP_TOKENS)),
        ignore_eos=fields.ignore_eos or False,
        temperature=1.0 if fields.temperature is None else _number("temperature", fields.temperature, 0, 2),
        top_p=1.0 if fields.top_p is None else _top_p(fields.top_p),
        top_k=0 if top_k == -1 else _within("top_k", top_k, 0, MAX_TOKENS) or 0,
        seed=_within("seed", fields.seed, *SEEDS),
        logprobs=logprobs,
        stream=fields.stream or False,
        include_usage=bool(fields.stream_options and fields.stream_options.include_usage),
        return_token_ids=fields.return_token_ids or False,
    )


def refuse_what_is_missing_here(fields: Fields) -> None:
    """Raise OpenAIError for a field that asks for what this server does not support."""
    for name in NEUTRAL.keys() & fields.keys():
        value = decoded(_anything, fields[name], name)
        if value is not None and value not in NEUTRAL[name]:
            raise invalid(name, "is not supported by this server")


def checked_max_tokens(param: str, count: int | None) -> int | None:
    return _within(param, count, 1, MAX_TOKENS)


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


def _number(param: str, value: float, least: float, most: float) -> float:
    if not least <= value <= most:
        raise invalid(param, f"must be from {least:g} to {most:g}, not {value:g}")
    return value


def _top_p(value: float) -> float:
    if not 0 < value <= 1:
        raise invalid("top_p", f"must be above 0 and at most 1, not {value:g}")
    return value


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
