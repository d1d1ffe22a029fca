"""The engines that compute tokens: a transformer in torch with a paged KV cache, and a synthetic one that computes
nothing but takes as long."""
