"""`pdflow check`: what can happen between engines and a network that misbehaves, explored with the protocol's own code."""
