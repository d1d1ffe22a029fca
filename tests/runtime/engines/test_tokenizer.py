"""Text and tokens: what the tiny model's files say, chats, and refusals in words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("tokenizers", reason="tokenizer.json is read by tokenizers: pip install 'pdflow[live]'")
pytest.importorskip("jinja2", reason="chat templates are jinja2's: pip install 'pdflow[live]'")

from pdflow_runtime.engines.config import ModelError
from pdflow_runtime.engines.tokenizer import ChatError, Tokenizer


@given(text=st.text())
def test_text_survives(tiny: Path, text: str) -> None:
    tokenizer = Tokenizer(tiny)
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert all(2 <= token < 512 for token in tokens)


def test_its_training_text_takes_fewer_tokens_than_bytes(tiny: Path) -> None:
    tokenizer = Tokenizer(tiny)
    text = "the prefill engine reads all tokens of the prompt"
    assert len(tokenizer.encode(text)) < len(text) / 2
    assert tokenizer.size == 512


def test_special_tokens_are_spelled_in_prompts_and_left_out_of_answers(tiny: Path) -> None:
    tokenizer = Tokenizer(tiny)
    tokens = tokenizer.encode("<|begin_of_text|>a<|end_of_text|>", special=False)
    assert (tokens[0], tokens[-1]) == (0, 1)
    assert tokenizer.decode(tokens) == "a"
    assert tokenizer.decode(tokens, skip_special=False) == "<|begin_of_text|>a<|end_of_text|>"


def test_a_larger_vocabulary_has_words_for_every_token(tmp_path: Path) -> None:
    tiny = pytest.importorskip("pdflow_runtime.engines.tiny", reason="tiny models are made with torch")
    size = {"hidden_size": 16, "intermediate_size": 16, "head_dim": 4}
    tokenizer = Tokenizer(tiny.tiny_model(tmp_path / "model", vocab_size=1000, **size))
    assert tokenizer.size == 1000
    assert tokenizer.decode([997, 999]) == " w997 w999"


def test_a_chat_is_what_the_template_makes_of_it(tiny: Path, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    assert Tokenizer(tiny).chat(messages) == "user: Hello\nassistant:"
    (tmp_path / "tokenizer.json").write_bytes((tiny / "tokenizer.json").read_bytes())
    with pytest.raises(ChatError, match="no chat template"):
        Tokenizer(tmp_path).chat(messages)
    template = "{{ bos_token }}{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}{{ x }}"
    settings = {"chat_template": [{"name": "default", "template": template}], "bos_token": {"content": "<s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert Tokenizer(tmp_path).chat(messages, x=1) == "<s>1"
    with pytest.raises(ChatError, match="user first"):
        Tokenizer(tmp_path).chat([{"role": "system"}])


@pytest.mark.parametrize(
    "template", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{% if %}", "{{ 1 / 0 }}"]
)
def test_a_template_reaches_nothing(tiny: Path, tmp_path: Path, template: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes((tiny / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(ChatError, match="rejects"):
        Tokenizer(tmp_path).chat([])


def test_a_folder_without_one_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json: No such file"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json: "):
        Tokenizer(tmp_path)
