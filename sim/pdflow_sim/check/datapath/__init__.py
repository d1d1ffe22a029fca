"""Exploration of each method's data path: real memories, shipments and pages, in every possible order."""
