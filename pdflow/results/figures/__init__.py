"""The figures of a run's records: percentiles, goodput, intervals."""
