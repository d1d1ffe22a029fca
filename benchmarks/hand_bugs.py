"""Ten bugs that somebody could have written: name, file of pdflow/protocol, what stands there, what would.

None is among sim/check/mutants, which drop rules; these are slips. `python benchmarks/mutate.py --hand` looks for them.
"""

HAND = (
    (
        "a pair's number taken for its bit, when a lost REG is repeated",
        "consumer_rules.py",
        "            bit = 1 << i\n",
        "            bit = i\n",
    ),
    ("the D rank's bit taken for the pair's", "consumer.py", "if bits >> i & 1:", "if bits >> d_rank & 1:"),
    ("a resolved request's deadline stays armed", "consumer.py", "            deadline_until=NEVER,\n", ""),
    (
        "the floor's own registration is not buried",
        "tombstones.py",
        "if seq >= self.floor and seq not in",
        "if seq > self.floor and seq not in",
    ),
    (
        "a fenced WRITE reported as CANCELLED, not IO",
        "producer.py",
        "    return end_registration(cell, Code.IO, True, now, ctx)\n",
        "    return end_registration(cell, Code.CANCELLED, True, now, ctx)\n",
    ),
    (
        "a repeated REG renews the lease",
        "producer.py",
        "return cell, acknowledge(cell, event.d_rank, ctx)",
        "return cell.with_lease(now + ctx.timers.lease_ns), acknowledge(cell, event.d_rank, ctx)",
    ),
    (
        "what waited for a connection is not forgotten when sent",
        "consumer_rank.py",
        "pending = self.pending.pop(peer, ())",
        "pending = self.pending.get(peer, ())",
    ),
    (
        "P's own rank's bit settled, not D's",
        "producer.py",
        "unsettled = cell.flying & ~(1 << event.d_rank)",
        "unsettled = cell.flying & ~(1 << ctx.rank)",
    ),
    (
        "connections to a former life count on",
        "peers.py",
        "self.connected = {p for p in self.connected if engine_of(p) != engine or p == peer}",
        "pass",
    ),
    (
        "a CANCEL repeated to those who have answered it",
        "consumer_rules.py",
        "everything(cell) & ~cell.settled, Cancel(",
        "everything(cell) & cell.settled, Cancel(",
    ),
)
