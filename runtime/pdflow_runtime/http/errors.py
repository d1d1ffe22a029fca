"""Errors between HTTP peers, and OpenAI's error object, by which a client learns of them.

    UpstreamError     an upstream server did not give a whole, well-formed answer
    OpenAIError       a request that is answered with an error; its status and body are the answer

A client that breaks off is no error here: it is the cancellation of its handler.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from pdflow.errors import PdflowError
from pdflow_runtime.http.messages import JSON, RETRY_AFTER, Headers

UpstreamProblem: TypeAlias = Literal["refused", "tls", "timeout", "closed", "malformed", "too large"]

TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    501: "server_error",
    502: "server_error",
    503: "server_error",
    504: "server_error",
}
"""OpenAI's `type` by status; any other 4xx is an invalid_request_error."""


class UpstreamError(PdflowError):
    """An upstream server gave no whole, well-formed answer. `kind` says what happened; `began` whether any byte of the
    answer had come."""

    def __init__(self, kind: UpstreamProblem, message: str, *, began: bool = False) -> None:
        super().__init__(message)
        self.kind = kind
        self.began = began


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | int | None


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of an error, `{"error": {"message", "type", "param", "code"}}`: all four keys, always."""

    error: ErrorDetail


class _UpstreamErrorDetail(msgspec.Struct, frozen=True):
    message: str
    param: str | None = None
    code: str | int | None = None


class _UpstreamErrorBody(msgspec.Struct, frozen=True):
    """The body of another server's error, which may have fewer keys than ours."""

    error: _UpstreamErrorDetail


_upstream_error = msgspec.json.Decoder(_UpstreamErrorBody)


class OpenAIError(PdflowError):
    """Raised for a request that is answered with an error; the code that answers the client replies with `status`,
    `headers` and `body()`."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    @classmethod
    def from_response(cls, status: int, body: bytes) -> OpenAIError | None:
        """Return the error that another server answered with; None if its body is not an error of this form."""
        try:
            error = _upstream_error.decode(body).error
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        return cls(status, error.message, param=error.param, code=error.code)

    @property
    def headers(self) -> Headers:
        """The headers of the answer."""
        return (JSON, RETRY_AFTER) if self.status in (429, 503) else (JSON,)

    def body(self) -> bytes:
        kind = TYPES.get(self.status, "invalid_request_error")
        return msgspec.json.encode(ErrorBody(ErrorDetail(str(self), kind, self.param, self.code)))
