"""A store's node, live, and the prefill engines that put there."""
