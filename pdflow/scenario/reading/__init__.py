"""Conversion of a file to a checked Scenario, and back to a file."""
