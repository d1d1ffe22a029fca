"""The parts of benchmarks/validate.py, one for each kind of published measurement."""
