"""Transfer methods, each described by a small file of what differs from the others."""
