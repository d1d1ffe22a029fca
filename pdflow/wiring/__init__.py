"""Construction of endpoints from a scenario, shared by the simulator and the live runtime."""
