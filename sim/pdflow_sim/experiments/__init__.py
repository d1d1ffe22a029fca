"""Many runs: seeds, sweeps, comparisons, calibration."""
