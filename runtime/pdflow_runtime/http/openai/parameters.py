"""Every field of a request that OpenAI or vLLM knows, and what this server does with it: one table, from which requests
are checked and docs/serve.md is written.

A field is *used*, or *refused* unless its value has no effect, or it has *no effect* on an answer here. What is in none
of these lists, neither OpenAI nor vLLM knows: it is ignored, as vLLM does, since clients send fields for other servers.

Sources: OpenAI's API reference; the classes of requests in vLLM 0.32 (vllm/entrypoints/openai/*/protocol.py), and the
fields that older versions had.
"""

from __future__ import annotations

from typing import Any, Final, Literal, TypeAlias

import attrs
import msgspec

from pdflow_runtime.http.errors import OpenAIError
from pdflow_runtime.http.openai.fields import invalid

Api: TypeAlias = Literal["completions", "chat"]
BOTH: Final[tuple[Api, ...]] = ("completions", "chat")
COMPLETIONS: Final[tuple[Api, ...]] = ("completions",)
CHAT: Final[tuple[Api, ...]] = ("chat",)
TRUNCATION: Final = ("truncate_prompt_tokens", "truncation_side")
"""Fields that shorten a prompt, which is done once: what they leave is what a router sends on."""


@attrs.frozen
class UsedField:
    """A field that requests are read by. `stream_options.NAME` is a field of that object."""

    name: str
    does: str
    apis: tuple[Api, ...] = BOTH


@attrs.frozen
class RefusedField:
    """A field that asks for what this server does not do. `neutral`: the values that ask for nothing; null never
    does."""

    name: str
    why: str
    neutral: tuple[Any, ...] = ()
    apis: tuple[Api, ...] = BOTH

    def refusal(self) -> OpenAIError:
        return invalid(self.name, f"is not supported by this server: {self.why}")


@attrs.frozen
class FieldWithoutEffect:
    """A field of which any value gives the same answer here."""

    name: str
    why: str


USED: Final = (
    UsedField("model", "must be the served model, or absent"),
    UsedField("prompt", "a text, token ids, or a list of either", COMPLETIONS),
    UsedField("messages", "texts of roles, for the model's chat template", CHAT),
    UsedField("prompt_token_ids", "the prompt as token ids, instead of `prompt` or `messages`"),
    UsedField(
        "truncate_prompt_tokens",
        "keeps that many tokens of the prompt; -1: as many as fit the context; a text that is longer than the context "
        "is refused before",
    ),
    UsedField(
        "truncation_side", '`"left"` (default) drops tokens from the start of the prompt, `"right"` from its end'
    ),
    UsedField("max_tokens", "default 16 for completions, for chats what fits the context; 0 only with `echo`"),
    UsedField("max_completion_tokens", "the newer name of `max_tokens`, which it overrides", CHAT),
    UsedField("min_tokens", "until the answer has so many tokens, no stop token can come and no stop string counts"),
    UsedField("n", "1 to 128; the seed of the i-th answer is `seed` + i"),
    UsedField("echo", "the answer begins with the prompt; with `logprobs`, `max_tokens` must be 0 or 1", COMPLETIONS),
    UsedField("logprobs", "0 to 20 likeliest tokens with each token, by the model's own probabilities", COMPLETIONS),
    UsedField("logprobs", "`true`: the logprob of each token, by the model's own probabilities", CHAT),
    UsedField("top_logprobs", "0 to 20 likeliest tokens with each token", CHAT),
    UsedField("temperature", "0 to 2; 0: the likeliest token"),
    UsedField("top_p", "above 0, at most 1"),
    UsedField("top_k", "0 and -1: all tokens"),
    UsedField("min_p", "0 to 1: only tokens that are so many times as likely as the likeliest"),
    UsedField("seed", "the same seed gives the same tokens, with and without disaggregation"),
    UsedField("frequency_penalty", "-2 to 2, for each time that the answer has the token"),
    UsedField("presence_penalty", "-2 to 2, for tokens that the answer has"),
    UsedField("repetition_penalty", "above 0, at most 100, for tokens of the prompt or the answer"),
    UsedField("logit_bias", "-100 to 100, by token id; at most 1,024"),
    UsedField("allowed_token_ids", "the only tokens that may come; at least one"),
    UsedField("bad_words", "at most 128 texts whose tokens, with and without a space before, may not come"),
    UsedField("stop", "at most 16 texts of 1,000 characters"),
    UsedField("stop_token_ids", "at most 256"),
    UsedField(
        "include_stop_str_in_output", "the answer's text ends with the stop string, or the text of the stop token"
    ),
    UsedField("ignore_eos", "the model's own stop tokens do not end the answer"),
    UsedField("skip_special_tokens", "`false`: special tokens are in the text"),
    UsedField("return_token_ids", "adds `token_ids` to the choices"),
    UsedField("stream", "the answer as server-sent events"),
    UsedField("stream_options.include_usage", "a last event with the usage"),
    UsedField(
        "stream_options.continuous_usage_stats",
        "with `include_usage`, the usage so far in each event; of one choice only",
    ),
    UsedField("user", "names the session, as the header `x-session-id` does, for routing"),
)

_GUIDED: Final = "guided decoding is left to vLLM's engines"
_TOOLS: Final = "tools are left to vLLM's engines"
_BEAMS: Final = "there is no beam search"
_TEMPLATE: Final = "the model's own chat template is used, as it is"
_TEXTS: Final = "texts only"
REFUSED: Final = (
    RefusedField("prompt", "a chat has `messages`", apis=CHAT),
    RefusedField("messages", "a completion has a `prompt`", apis=COMPLETIONS),
    RefusedField("max_completion_tokens", "of chats; a completion has `max_tokens`", apis=COMPLETIONS),
    RefusedField("top_logprobs", "of chats; a completion has `logprobs`", apis=COMPLETIONS),
    RefusedField("echo", "of completions", (False,), CHAT),
    RefusedField("suffix", "no text is inserted before another one", ("",)),
    RefusedField("best_of", "answers are not ranked; use `n`", (1,)),
    RefusedField("use_beam_search", _BEAMS, (False,)),
    RefusedField("length_penalty", _BEAMS, (1,)),
    RefusedField("early_stopping", _BEAMS, (False,)),
    RefusedField("prompt_logprobs", "use `echo` with `logprobs` and `max_tokens` = 0"),
    RefusedField("prompt_embeds", "prompts are texts or token ids"),
    RefusedField("logits_processors", "requests bring no code", ([],)),
    RefusedField("logprob_token_ids", "logprobs are those of the likeliest tokens", ([],)),
    RefusedField("return_tokens_as_token_ids", "use `return_token_ids`", (False,)),
    RefusedField("return_prompt_text", "use `echo`", (False,)),
    RefusedField("spaces_between_special_tokens", "the tokenizer decides", (True,)),
    RefusedField("add_special_tokens", "prompts begin as the model's tokenizer says", (True,), COMPLETIONS),
    RefusedField("add_special_tokens", "the chat template has them", (False,), CHAT),
    RefusedField("response_format", _GUIDED, ({"type": "text"},)),
    RefusedField("structured_outputs", _GUIDED),
    RefusedField("guided_json", _GUIDED),
    RefusedField("guided_regex", _GUIDED),
    RefusedField("guided_choice", _GUIDED),
    RefusedField("guided_grammar", _GUIDED),
    RefusedField("guided_decoding_backend", _GUIDED),
    RefusedField("guided_whitespace_pattern", _GUIDED),
    RefusedField("structural_tag", _GUIDED),
    RefusedField("functions", _TOOLS, ([],)),
    RefusedField("function_call", _TOOLS, ("none", "auto")),
    RefusedField("tools", _TOOLS, ([],)),
    RefusedField("tool_choice", _TOOLS, ("none", "auto")),
    RefusedField("web_search_options", _TOOLS),
    RefusedField("modalities", _TEXTS, (["text"],)),
    RefusedField("audio", _TEXTS),
    RefusedField("media_io_kwargs", _TEXTS, ({},)),
    RefusedField("mm_processor_kwargs", _TEXTS, ({},)),
    RefusedField("documents", _TEMPLATE, ([],)),
    RefusedField("chat_template", _TEMPLATE),
    RefusedField("chat_template_kwargs", _TEMPLATE, ({},)),
    RefusedField("add_generation_prompt", _TEMPLATE, (True,)),
    RefusedField("continue_final_message", _TEMPLATE, (False,)),
    RefusedField("reasoning_effort", "models are not asked to reason", ("none",)),
    RefusedField("thinking_token_budget", "models are not asked to reason", (-1,)),
    RefusedField("verbosity", "models are not asked to be short or long", ("medium",)),
    RefusedField("priority", "requests are served in the order of their arrival", (0,)),
    RefusedField("service_tier", "requests are served in the order of their arrival", ("auto", "default")),
    RefusedField("cache_salt", "remembered prefixes are shared by all clients"),
    RefusedField("stream_interval", "each token is an event", (1,)),
    RefusedField("repetition_detection", "answers end by `stop`, `stop_token_ids` and `max_tokens`"),
    RefusedField("watermarking", "answers have no watermark", (False,)),
    RefusedField("routed_experts_prompt_start", "models have no experts", (0,)),
    RefusedField("ec_transfer_params", _TEXTS),
    RefusedField("vllm_xargs", "extensions of vLLM are not known here", ({},)),
    RefusedField("moderation", "answers are not moderated"),
)
"""Fields whose values would change the answer, or how it is served."""

_STORED: Final = "nothing is stored"
NO_EFFECT: Final = (
    FieldWithoutEffect("metadata", _STORED),
    FieldWithoutEffect("store", _STORED),
    FieldWithoutEffect("safety_identifier", "answers are not moderated"),
    FieldWithoutEffect("prompt_cache_key", "prefixes are remembered by their tokens"),
    FieldWithoutEffect("prompt_cache_options", "prefixes are remembered by their tokens"),
    FieldWithoutEffect("prompt_cache_retention", "prefixes are remembered while there is memory"),
    FieldWithoutEffect("prediction", "it would save time only"),
    FieldWithoutEffect("parallel_tool_calls", "there are no tools"),
    FieldWithoutEffect("include_reasoning", "there is no reasoning"),
    FieldWithoutEffect("request_id", "the router names requests; the header `x-request-id` is returned"),
    FieldWithoutEffect("session_id", "the header `x-session-id` names the session, or `user`"),
    FieldWithoutEffect("return_token_offsets", "of vLLM's `/render`"),
    FieldWithoutEffect("mm_payload", "of vLLM's `/render`"),
    FieldWithoutEffect("return_mm_kwargs", "of vLLM's `/render`"),
    FieldWithoutEffect("stream_options.include_obfuscation", "events are not padded"),
    FieldWithoutEffect("kv_transfer_params", "the router sets it"),
    FieldWithoutEffect("pdflow", "the router sets it"),
)


_REFUSED: Final = {api: {field.name: field for field in REFUSED if api in field.apis} for api in BOTH}


def refused_fields(api: Api) -> dict[str, RefusedField]:
    """Return the refused fields of one API, by name."""
    return _REFUSED[api]


def used_rows() -> list[str]:
    """Return the table of used fields for the documentation."""
    rows = [f"| `{field.name}` | {_where(field.apis)} | {field.does} |" for field in USED]
    return ["| field | API | |", "| --- | --- | --- |", *rows]


def refused_rows() -> list[str]:
    rows = [
        f"| `{field.name}` | {_where(field.apis)} | {', '.join(map(_json, field.neutral))} | {field.why} |"
        for field in REFUSED
    ]
    return ["| field | API | accepted values | reason |", "| --- | --- | --- | --- |", *rows]


def no_effect_rows() -> list[str]:
    return ["| field | reason |", "| --- | --- |", *(f"| `{field.name}` | {field.why} |" for field in NO_EFFECT)]


def _where(apis: tuple[Api, ...]) -> str:
    return "both" if apis == BOTH else apis[0]


def _json(value: Any) -> str:
    return f"`{msgspec.json.encode(value).decode()}`"
