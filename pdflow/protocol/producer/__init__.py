"""P's side of the protocol: cells, rules, and the endpoints of its scheduler and ranks."""
