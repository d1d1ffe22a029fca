"""kv_transfer_params of the Mooncake connectors. V0 has none: P and D are a pair by their files, and match by tokens.

V1 is vLLM 0.32.0's MooncakeConnector. P answers no parameters, so the router sends all of
them, perhaps before the prefill. If a field is missing, vLLM warns and continues without a transfer: D computes the
prompt again, and P holds it for 480 s. Here the request is refused.
"""

from __future__ import annotations

import attrs

from pdflow.methods.params.extras import Params
from pdflow.methods.params.fields import param
from pdflow.methods.params.kinds import BOOTSTRAP, ID, NAME, NO, YES


@attrs.frozen(kw_only=True)
class MooncakeV1Prefill(Params):
    """The parameters of the prefill leg, from the router to P."""

    do_remote_decode: bool = param(YES, "P holds the prompt's blocks for a D", default=True, required=True)
    do_remote_prefill: bool = param(NO, "P prefills itself", default=False)
    transfer_id: str = param(ID, "made by the router; the same in both legs; the match key")


@attrs.frozen(kw_only=True)
class MooncakeV1Decode(Params):
    """The parameters of the decode leg, from the router to D: D asks the P that the bootstrap server names, P
    writes."""

    do_remote_decode: bool = param(NO, "D decodes itself", default=False)
    do_remote_prefill: bool = param(YES, "P prefills for D", default=True, required=True)
    remote_bootstrap_addr: str = param(BOOTSTRAP, "P's bootstrap server, which D queries at /query")
    remote_engine_id: str = param(NAME, "P's engine_id, one for each data parallel rank")
    transfer_id: str = param(ID, "as in the prefill leg")
