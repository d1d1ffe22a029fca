"""The state machine of KV transfer: what P, D and their ranks do on every event. Checker, simulator and live runtime
run the same code.

Where to look, by question:

- what can happen, what is done about it: `events`, `effects`; what travels between engines: `messages`, bytes in `wire`
- what decides about a finished prompt and its WRITEs: `producer.cell` (the cell), `producer.writes` (rules; their
  table: `producer.rules`) and `producer.rank`, which owns a store of cells: `producer.cells`, and an object for D's
  frames: `producer.frames`. A REG goes from `producer.frames` by way of the store's `apply` to its rule in
  `producer.writes`
- what a lease's end means, in every phase and dialect: `lease`
- what decides about a request that waits for its KV: `consumer.cell` (the cell; rules and their table:
  `consumer.rules`) and `consumer.scheduler`, which owns a store of cells: `consumer.cells`; at its ranks
  `consumer.rank`; what P's frames do there: `consumer.frames`, and its READs: `consumer.reads`
- which registration belongs to which prompt: `matching`; what is remembered of ended ones: `tombstones`
- which peers are connected, which incarnation of an engine is valid: `peers`; how long anything lasts: `timers`,
  `deadlines`
- what differs between the dialects: `dialect`; which phase may follow which: `phases`
- what must always hold, checked from outside: `invariants.oracle`, over `invariants.blocks` and `invariants.operations`
"""
