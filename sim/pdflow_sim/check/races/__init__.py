"""The 52 named races of PROTOCOL 5: what becomes of each in every dialect, and where that is shown."""
