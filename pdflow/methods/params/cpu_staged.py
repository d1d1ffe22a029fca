"""kv_transfer_params of the CPU connector, vLLM #18332.

P gets no parameters and answers with its own request id, which the router hands to D. The original's D computes the
prompt itself if it gets none, while what P has sent stays in its ring; here the request is refused.
"""

from __future__ import annotations

import attrs

from pdflow.methods.params.extras import Params
from pdflow.methods.params.fields import param
from pdflow.methods.params.kinds import ID


@attrs.frozen(kw_only=True)
class CpuStagedDecode(Params):
    """The parameters of the decode leg: P's answer, which the router sends to D."""

    prefill_request_id: str = param(ID, "P's request id, under which its pieces arrive")
