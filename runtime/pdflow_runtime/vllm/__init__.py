"""pdflow as a KV connector of vLLM: the scheduler's half and each worker's half, as drivers of cores and endpoints.

`connector.py`, `stats.py` and `plugin.py` import vLLM. The other files take vLLM's objects as they are given, so they
are tested without it.
"""
