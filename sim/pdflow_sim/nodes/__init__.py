"""The simulator's drivers of the cores of engines, stores and the router."""
