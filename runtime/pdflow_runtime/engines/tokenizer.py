"""Text to tokens and back, and chats to prompts: tokenizer.json and the chat template of a Hugging Face folder.

Templates are untrusted code: they run in jinja2's sandbox.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as Pieces

from pdflow_runtime.engines.config import ModelError, read_json

SLICE: Final = 16 << 10
"""Characters that are tokenized at once to count the tokens of a long text: the library needs some 250 bytes for each
token."""


class ChatError(ValueError):
    """The chat cannot be made a prompt: the model has no template, or the template refuses these messages."""


class Tokenizer:
    """The tokenizer of one model. Raises ModelError if the folder has none."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{path}: No such file or directory")
        try:
            self._pieces: Final = Pieces.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ModelError(f"{path}: {error}") from None
        settings = folder / "tokenizer_config.json"
        self._settings: Final = read_json(settings) if settings.is_file() else {}
        self._template: Final = _template(folder, self._settings)

    @property
    def size(self) -> int:
        """The number of tokens of the vocabulary; the model may have room for more."""
        return self._pieces.get_vocab_size()

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Return the tokens of a text. `special`: whether the model's own first token is put before it, as its files
        say."""
        # A batch, as the library lets others have their turn meanwhile for no less.
        ids: list[int] = self._pieces.encode_batch_fast([text], add_special_tokens=special)[0].ids
        return ids

    def exceeds(self, text: str, most: int) -> bool:
        """True if the text has more than `most` tokens by far, so many that it should not be tokenized whole. The text
        is tokenized in slices, up to twice that many tokens: a text in slices has some tokens more than the whole."""
        if len(text) <= max(SLICE, most // 2):
            return False
        found = 0
        for at in range(0, len(text), SLICE):
            found += len(self.encode(text[at : at + SLICE], special=False))
            if found > 2 * most:
                return True
        return False

    def spelled(self, tokens: Sequence[int]) -> list[str]:
        """Return each token as the vocabulary spells it; "" for an id that is none."""
        return [self._pieces.id_to_token(token) or "" for token in tokens]

    def decode(self, tokens: Sequence[int], skip_special: bool = True) -> str:
        """Return the text of the tokens; bytes that are not UTF-8 become U+FFFD, ids that are no token are left out."""
        text: str = self._pieces.decode(tokens, skip_special_tokens=skip_special)
        return text

    def chat(self, messages: Sequence[Mapping[str, Any]], **more: Any) -> str:
        """Return the prompt that the template makes of OpenAI's messages, special tokens spelled out. Raises ChatError.

        Encode it with `special=False`. `more`: other variables of the template, such as tools.
        """
        if self._template is None:
            raise ChatError("this model has no chat template: use /v1/completions")
        known = {name: _token(self._settings.get(name)) for name in ("bos_token", "eos_token")}
        arguments = {"add_generation_prompt": True, **known, **more}
        try:
            return _SANDBOX.from_string(self._template).render(messages=messages, **arguments)
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise ChatError(f"the model's chat template rejects these messages: {error}") from None


def _refused(reason: str) -> NoReturn:
    raise TemplateError(reason)


_SANDBOX: Final = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
_SANDBOX.globals["raise_exception"] = _refused


def _template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    found = settings.get("chat_template")
    if isinstance(found, list):
        found = next((each["template"] for each in found if each["name"] == "default"), None)
    return found


def _token(entry: Any) -> str:
    """Return a token that the settings give by its text, or by an object that has it."""
    return entry["content"] if isinstance(entry, dict) else entry or ""
