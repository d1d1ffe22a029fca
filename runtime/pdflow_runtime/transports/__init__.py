"""How KV gets from one rank's memory into another's: one small interface, and what carries the bytes behind it.

`base.py` says what every transport promises. `shm.py` and `tcp.py` keep it with what a plain Linux has, `cuda_ipc.py`
with CUDA, `nixl.py`, `mooncake.py` and `nccl/transport.py` with those libraries. All listen and answer by `host.py`,
and post by `agent.py`. Where the receiver fetches, it does so by `moving.py`, with a library by `registered.py`; where
it asks, by `asking.py`.
"""
