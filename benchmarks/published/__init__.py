"""Tables of what was published about one mechanism each, beside what the simulator says."""
