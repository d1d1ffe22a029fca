"""The schema of scenario files: one attrs class per table."""
