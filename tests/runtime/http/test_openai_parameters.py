"""The table of request fields is complete: requests are read by what it calls used, and nothing that OpenAI or vLLM
knows is missing."""

from __future__ import annotations

from collections import Counter
from typing import Final

from pdflow_runtime.http.openai.chat import _Chat
from pdflow_runtime.http.openai.completion import _Completion
from pdflow_runtime.http.openai.parameters import (
    BOTH,
    NO_EFFECT,
    REFUSED,
    USED,
    Api,
    no_effect_rows,
    refused_rows,
    used_rows,
)
from pdflow_runtime.http.openai.sampling import SharedFields, StreamOptions

OPENAI: Final = """
    model messages prompt audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens
    max_tokens metadata modalities moderation n parallel_tool_calls prediction presence_penalty prompt_cache_key
    prompt_cache_options prompt_cache_retention reasoning_effort response_format safety_identifier seed service_tier
    stop store stream stream_options temperature tool_choice tools top_logprobs top_p user verbosity web_search_options
    best_of echo suffix
"""
"""The parameters of chat.completions.create and completions.create in openai 3.57.0."""
VLLM: Final = """
    use_beam_search top_k min_p repetition_penalty watermarking length_penalty stop_token_ids include_stop_str_in_output
    ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side
    allowed_token_ids prompt_logprobs logprob_token_ids bad_words prompt_embeds add_special_tokens structured_outputs
    priority request_id session_id return_tokens_as_token_ids return_token_ids routed_experts_prompt_start
    return_token_offsets mm_payload return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params vllm_xargs
    repetition_detection thinking_token_budget stream_interval include_reasoning add_generation_prompt
    continue_final_message documents chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs
    return_prompt_text
"""
"""What CompletionRequest and ChatCompletionRequest of vLLM 0.32 add."""


def test_every_field_that_openai_or_vllm_knows_is_in_the_table() -> None:
    tables = {field.name.partition(".")[0] for field in (*USED, *REFUSED, *NO_EFFECT)}
    assert not set((OPENAI + VLLM).split()) - tables


def test_the_table_says_used_of_what_requests_are_read_by() -> None:
    """Every field of a request has one row for each API, and a field that is read is a used one."""
    rows = Counter((field.name, api) for field in (*USED, *REFUSED) for api in field.apis)
    rows.update((field.name, api) for field in NO_EFFECT for api in BOTH)
    assert {row for row, count in rows.items() if count > 1} == set()
    used = {(field.name, api) for field in USED for api in field.apis}
    bodies: dict[Api, type[SharedFields]] = {"completions": _Completion, "chat": _Chat}
    for api, body in bodies.items():
        read = {*body.__struct_fields__} - {"stream_options", "kv_transfer_params", "pdflow"}
        read |= {f"stream_options.{name}" for name in StreamOptions.__struct_fields__}
        assert {name for name, where in used if where == api} == read


def test_the_tables_of_the_documentation_have_a_row_for_each_field() -> None:
    for rows, count in ((used_rows(), len(USED)), (refused_rows(), len(REFUSED)), (no_effect_rows(), len(NO_EFFECT))):
        assert len(rows) == count + 2
        assert len({row.count("|") for row in rows}) == 1
