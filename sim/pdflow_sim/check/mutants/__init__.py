"""Rules of the protocol, each dropped or broken by a named patch: what the search must find, or it proves nothing.

Nothing outside sim/pdflow_sim/check may import this.
"""
