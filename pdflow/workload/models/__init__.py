"""Bundled workload models: figures computed from published traces by benchmarks/fit_workload.py, one TOML file each."""
