"""The 52 named races of spec 8: the outcome of each in every dialect, and the search or test that shows it."""
