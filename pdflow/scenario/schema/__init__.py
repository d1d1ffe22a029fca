"""What a scenario file can say: one attrs class per table."""
