"""Files, replays, shrinking and diagrams of counterexamples."""
