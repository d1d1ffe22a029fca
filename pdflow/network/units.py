"""Integer units of time, rate and bytes in which the network counts without drift.

A max-min share is rarely a whole number of bytes per second (C / 3 is not), so whole bytes and whole nanoseconds would
lose a little on every change of rates. Three finer units make the arithmetic exact except in two named places:

- a *tick* is 2**-32 ns: instants inside the network;
- a *rate* is counted in 2**-64 bytes/s, which is the same as *quanta per tick*;
- a *quantum* is what one unit of rate carries in one tick, 1 / (10**9 * 2**96) of a byte: service and sizes.

Service = rate * ticks is then an exact product, with no division. What is rounded:

1. A share is floored to 2**-64 bytes/s. Over D seconds at r bytes/s that is D * 2**-64 / r seconds: 5e-9 ns for a flow
   of 1 kB/s that lasts a day, and far less for any real one.
2. A finish is raised to the next tick. Until then the flow keeps its share, so a link's other flows lose less than
   2**-32 ns of that link's work per departure. The link itself never idles, so such losses only add up within one busy
   period: 2**-32 ns times the departures in it, 0.25 ns after a thousand million of them.

A finish is reported in whole ns, rounded up. Rounding 1 would turn a finish at exactly 300 ms into 300 ms + 1 ns, so an
end that is less than SNAP_TICKS (2**-20 ns) past a whole nanosecond is taken to lie on it. tests/network holds all this
against fluid models in exact fractions.
"""

from __future__ import annotations

TICK_BITS = 32
"""1 ns is 2**TICK_BITS ticks."""

RATE_BITS = 64
"""1 byte/s is 2**RATE_BITS quanta per tick."""

QUANTA_PER_BYTE = 10**9 << (TICK_BITS + RATE_BITS)

SNAP_TICKS = 1 << (TICK_BITS - 20)
"""An end that is at most this far beyond a whole nanosecond lies on it."""
