"""Engines, stores and the router as the simulator's drivers of their cores."""
