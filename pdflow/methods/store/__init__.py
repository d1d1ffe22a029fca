"""The store's keys, objects, memory and ledger."""
