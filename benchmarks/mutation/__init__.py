"""Bugs that nobody chose: how many `pdflow check` notices, and what notices the others. See __main__.py."""
