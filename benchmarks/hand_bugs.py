"""Bugs that somebody could have written: name, file of pdflow/protocol, what stands there, what would.

None is among sim/pdflow_sim/check/mutants, which drop rules; these are slips, ten for each run of docs/bugs.md, written
before it. `python -m benchmarks.mutation hunt --hand` looks for them.
"""

FIRST = (
    (
        "a pair's number taken for its bit, when a lost REG is repeated",
        "consumer/rules.py",
        "    bit = _bit_at(cell, event.op)\n    if ctx.pulls or",
        "    bit = _bit_at(cell, event.op) >> 1\n    if ctx.pulls or",
    ),
    ("the D rank's bit taken for the pair's", "consumer/cell.py", "if bits >> i & 1:", "if bits >> d_rank & 1:"),
    ("a resolved request's deadline stays armed", "consumer/cell.py", "            deadline_until=NEVER,\n", ""),
    (
        "the floor's own registration is not buried",
        "producer/tombstones.py",
        "if seq >= self.floor and seq not in",
        "if seq > self.floor and seq not in",
    ),
    (
        "a fenced WRITE reported as CANCELLED, not IO",
        "producer/writes.py",
        "    return end_registration(cell, Code.IO, True, now, ctx)\n",
        "    return end_registration(cell, Code.CANCELLED, True, now, ctx)\n",
    ),
    (
        "a repeated REG renews the lease",
        "producer/writes.py",
        "return cell, acknowledge(cell, event.d_rank, ctx)",
        "return cell.with_lease(now + ctx.timers.lease_ns), acknowledge(cell, event.d_rank, ctx)",
    ),
    (
        "what waited for a connection is not forgotten when sent",
        "consumer/rank.py",
        "pending = self.pending.pop(peer, ())",
        "pending = self.pending.get(peer, ())",
    ),
    (
        "P's own rank's bit settled, not D's",
        "producer/writes.py",
        "unsettled = cell.in_flight_mask & ~(1 << event.d_rank)",
        "unsettled = cell.in_flight_mask & ~(1 << ctx.rank)",
    ),
    (
        "connections to a former life count on",
        "peers.py",
        "self.connected = {p for p in self.connected if engine_of(p) != engine or p == peer}",
        "pass",
    ),
    (
        "a CANCEL repeated to those who have answered it",
        "consumer/rules.py",
        "everything(cell) & ~cell.settled, Cancel(",
        "everything(cell) & cell.settled, Cancel(",
    ),
)
SECOND = (
    (
        "the floor itself counts as below the floor",
        "producer/tombstones.py",
        "        if reg.seq < self.floor:\n",
        "        if reg.seq <= self.floor:\n",
    ),
    (
        "SYNC leaves out what is in quarantine",
        "consumer/scheduler.py",
        "c.phase in (WAITING, QUARANTINED))",
        "c.phase is WAITING)",
    ),
    (
        "a registration that is dropped keeps its base id",
        "producer/matching.py",
        "            _drop(self.registration_bases, base_id(reg.request_id), reg)\n",
        "",
    ),
    (
        "a RELEASE lengthens a lease, and never shortens it",
        "producer/lease.py",
        "until < cell.lease_until else cell",
        "until > cell.lease_until else cell",
    ),
    (
        "a handshake that failed counts as under way",
        "peers.py",
        "        self.connecting.discard(peer)\n        self.connected.discard(peer)\n",
        "        self.connected.discard(peer)\n",
    ),
    (
        "a stall is noted when it moves away, not when it comes nearer",
        "consumer/cells.py",
        "if after.stall_until < before.stall_until:",
        "if after.stall_until > before.stall_until:",
    ),
    (
        "the grant's time taken for the lease's",
        "producer/writes.py",
        "if cell.expired or (cell.lease_until <= now and",
        "if cell.expired or (cell.registration_until <= now and",
    ),
    (
        "what a D has stopped wanting stays noted",
        "producer/frames.py",
        "        if interest:\n            store.interests[sender] = interest\n        else:\n"
        "            store.interests.pop(sender, None)\n",
        "        if interest:\n            store.interests[sender] = interest\n",
    ),
    (
        "a rank does not note which READ it was told of last",
        "consumer/rank.py",
        "        self.newest = max(self.newest, event.registration.reg.seq)\n",
        "",
    ),
    (
        "the last rank's word counts, not the worst",
        "producer/scheduler.py",
        "code = product.code if event.code is Code.NONE else event.code",
        "code = event.code",
    ),
)
HAND = (*FIRST, *SECOND)
