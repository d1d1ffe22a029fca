"""How KV gets from one rank's memory into another's: one small interface, and what carries the bytes behind it.

`base.py` says what every transport promises. `shm.py` and `tcp.py` keep it with what a plain Linux has, `nixl.py`
with NIXL. All three listen and answer by `host.py`, and post by `agent.py`; where the receiver fetches, by `moving.py`.
"""
