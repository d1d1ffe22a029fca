"""What computes tokens: a transformer in torch with a paged KV cache, or one that only takes as long as one would."""
