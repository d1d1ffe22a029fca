"""The JSON body of a request to the server: its prompt, the length of its answer, and the fields that all requests
share."""

from __future__ import annotations

from typing import Any, Final

import attrs
import msgspec

from pdflow_runtime.bench.contents import as_text

CHAT: Final = "/chat/completions"
"""How the path of the chat API ends."""


@attrs.frozen(kw_only=True)
class RequestForm:
    """The fields that all requests of a run share. `extra` are sent as they are, and take precedence over the
    others."""

    path: str
    model: str
    ignore_eos: bool = False
    return_token_ids: bool = False
    sampling: dict[str, Any] = attrs.field(factory=dict)
    extra: dict[str, Any] = attrs.field(factory=dict)

    @property
    def chat(self) -> bool:
        """True if the API takes messages, not tokens."""
        return self.path.rstrip("/").endswith(CHAT)

    def body(self, prompt: list[int] | str, max_tokens: int) -> bytes:
        """Return the body of one request, streamed, with the server's own token counts at its end."""
        fields: dict[str, Any] = {"model": self.model}
        if self.chat:
            content = prompt if isinstance(prompt, str) else as_text(prompt)
            fields |= {"messages": [{"role": "user", "content": content}], "max_completion_tokens": max_tokens}
        else:
            fields |= {"prompt": prompt, "max_tokens": max_tokens}
        fields |= {"stream": True, "stream_options": {"include_usage": True}, **self.sampling}
        if self.ignore_eos:
            fields["ignore_eos"] = True
        if self.return_token_ids:
            fields["return_token_ids"] = True
        return msgspec.json.encode(fields | self.extra)
