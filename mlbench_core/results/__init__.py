"""Record, verify and compare the results of runs."""
