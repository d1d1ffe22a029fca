"""How KV gets from one rank's memory into another's: one small interface, and what carries the bytes behind it.

`base.py` says what every transport promises; `shm.py` and `tcp.py` keep it with what a plain Linux machine has.
"""
