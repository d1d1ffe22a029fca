"""Real vLLM instances on CPU, driven from outside: one pair of a prefill and a decode instance, or one alone.

`instances` starts them, `client` sends them requests, `identity`, `faults` and `latency` are commands. They run in
vLLM's own environment (`environment.sh` makes it), with tiny random weights that `model` writes. Every address is
127.0.0.1.
"""
