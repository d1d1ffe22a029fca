"""`pdflow check`: what can happen between engines and a network that misbehaves, by the protocol's own code."""
