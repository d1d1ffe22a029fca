"""The request handling of one engine's role, between its endpoints and what computes, moves KV and answers clients."""
