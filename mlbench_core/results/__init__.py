"""Results of runs: the folder that every run leaves, statistics over repeats, tables and figures."""
