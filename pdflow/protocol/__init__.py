"""The state machine of KV transfer: what P, D and their ranks do about every event, in one place for three worlds.

Where to look, by question:

- what can happen, what is done about it: `events`, `effects`; what travels between engines: `messages`, bytes in `wire`
- who decides about a finished prompt and its WRITEs: `producer` (rules; their table: `producer_rules`), `producer_rank`
- what a lease's end means, in every phase and dialect: `lease`
- who decides about a request that waits for its KV: `consumer` (rules and table), `consumer_scheduler`, `consumer_rank`
- which registration belongs to which prompt: `matching`; what is remembered of ended ones: `tombstones`
- who is connected, which life of an engine counts: `peers`; how long anything lasts: `timers`, `deadlines`
- what differs between `strict` and `vllm-compat`: `dialect`; which phase may follow which: `phases`
- what must always hold, judged from outside: `invariants`
"""
