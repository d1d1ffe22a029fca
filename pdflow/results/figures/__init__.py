"""From records to figures: percentiles, goodput, intervals."""
