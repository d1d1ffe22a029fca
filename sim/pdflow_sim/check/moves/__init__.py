"""Possible moves in an explored state, and the states that they lead to."""
