"""The 52 named races of PROTOCOL 5: the outcome of each in every dialect, and the search or test that shows it."""
