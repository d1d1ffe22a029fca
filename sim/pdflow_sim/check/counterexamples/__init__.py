"""Counterexamples: written, replayed, shrunk and drawn."""
