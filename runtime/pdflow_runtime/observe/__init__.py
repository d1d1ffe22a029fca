"""Records of a live cluster, and how they are shown."""
