"""The decision after a failed attempt of a request: the request fails, is retried, or its answer is resumed.

It is made here alone, for every driver. A client that has received the start of an answer must not
receive the start of another one: two attempts may sample different tokens, and nothing can be taken back from a stream.
So after the first token of an attempt has reached the client, another attempt may only continue behind the tokens that
the client has (`resume`), or the request fails.

The driver reports what counts as received (`FirstTokenDelivered`). A client that does not stream receives its
answer whole or not at all, so nothing is reported for it until the answer begins to pass. P's token (first_token =
"prefill") is not reported either: the decode leg of every later attempt is given that token and continues behind it.
"""

from __future__ import annotations

from enum import Enum

from pdflow.protocol.messages import Code


class AfterFailure(Enum):
    FAIL = "fail"
    """The request fails."""
    RETRY = "retry"
    """Another attempt computes the answer from its first token."""
    RESUME = "resume"
    """Another attempt continues behind the tokens that the client has received."""


def after_failure(
    code: Code, answer_started: bool, attempts: int, max_attempts: int, resumes: bool = False
) -> AfterFailure:
    """Decide what follows the failure of an attempt with that code.

    Args: `answer_started`: the client has received a token of that attempt, or of one before it; `attempts` have been
    made so far; `resumes`: answers may be resumed.
    """
    if code is Code.REJECTED:
        # The request is at fault, and another engine would refuse it too.
        return AfterFailure.FAIL
    if attempts >= max_attempts:
        return AfterFailure.FAIL
    if answer_started:
        return AfterFailure.RESUME if resumes else AfterFailure.FAIL
    return AfterFailure.RETRY
