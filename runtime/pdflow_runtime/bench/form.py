"""What is asked of the server, besides the prompt and how many tokens are to answer it: one JSON body per request."""

from __future__ import annotations

from typing import Any, Final

import attrs
import msgspec

from pdflow_runtime.bench.contents import as_text

CHAT: Final = "/chat/completions"
"""How the path of the chat API ends."""


@attrs.frozen(kw_only=True)
class RequestForm:
    """`extra` are fields as they are, which go before ours."""

    path: str
    model: str
    ignore_eos: bool = False
    return_token_ids: bool = False
    sampling: dict[str, Any] = attrs.field(factory=dict)
    extra: dict[str, Any] = attrs.field(factory=dict)

    @property
    def chat(self) -> bool:
        """Whether it takes messages, not tokens."""
        return self.path.rstrip("/").endswith(CHAT)

    def body(self, prompt: list[int] | str, max_tokens: int) -> bytes:
        """One request, streamed, with the server's own counts at its end."""
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
