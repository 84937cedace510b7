"""Compare the results of runs: statistics over repeats, tables, figures, prices and rules."""
