"""The live node of a store, and the prefill engines that put into it."""
