"""Mutants: rules of the protocol, each dropped or broken by a named patch, which the search must catch.

Nothing outside sim/pdflow_sim/check may import this.
"""
