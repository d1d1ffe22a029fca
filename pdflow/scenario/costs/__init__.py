"""The durations of steps and transfers, by a scenario's cost models."""
