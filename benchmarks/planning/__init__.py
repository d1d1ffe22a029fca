"""`pdflow plan` held against what it must find: docs/planning.md has the results."""
