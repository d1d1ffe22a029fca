"""States of the explored world: their representation, when two count as equal, and the invariants checked on them."""
