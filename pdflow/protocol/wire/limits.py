"""Upper limits of everything that a peer sends. What exceeds them is refused before it is used or stored.

Chosen so that nothing a correct engine sends comes near, and one hostile stream costs megabytes at most.
"""

from __future__ import annotations

MAX_FRAME_BYTES = 8 << 20
"""One strict frame after its length field: a SYNC of an engine with 65,536 requests in its queue is under 4 MiB."""

MAX_NOTIFICATION_BYTES = 4 << 20
"""One NIXL notification: a heartbeat of 65,536 ids of vLLM's usual 50 bytes fits."""

MAX_HANDSHAKE_BYTES = 4 << 20
"""One body frame of the side channel: NIXL's blob for some thousands of regions is tens of KiB."""

MAX_ID_BYTES = 512
"""A request id or xid, in UTF-8. vLLM's are a client's X-Request-Id and some 20 bytes; check at admission."""

MAX_NAME_BYTES = 255
"""An engine id, address, host (DNS allows 253), layer or backend name, in UTF-8."""

MAX_HEARTBEAT_IDS = 65_536
MAX_BLOCKS = 65_536
"""Block ids in one registration: 2**20 tokens in blocks of 16."""

MAX_GROUPS = 64
"""KV cache groups of one model. gpt-oss has 2; a model with one full layer to five with a sliding window has 6."""

MAX_POSITIONS = 4 * MAX_BLOCKS
"""Entries of the block tables of all groups together, those without a block included."""

MAX_BLOCK_ID = 2**32 - 1
"""The largest block id: it fits 5 bytes of msgpack, which is what the size formulas count for each."""

MAX_BLOCK_TOKENS = 65_536
MAX_TOKENS = 2**32 - 1
MAX_RANKS = 4_096
"""Ranks of one engine (tp times pp), so also any tp, pp, rank or completion count."""

MAX_SYNC_XIDS = 65_536
MAX_SYNC_REGS = 65_536
"""Open registrations in a SYNC, items in its answer."""

MAX_REGIONS = 65_536
"""Registered memory regions of one agent: layers times tensors per layer."""

MAX_CAPABILITIES = 64
MAX_U63 = 2**63 - 1
MAX_U64 = 2**64 - 1
"""The largest incarnation, generation, digest or weight version: what one msgpack integer holds."""

MAX_REASON_CHARS = 200
"""Length of a reason for refusal in a log: a peer chooses parts of that text."""
