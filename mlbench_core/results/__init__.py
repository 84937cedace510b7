"""Write, read, verify and compare the results of runs."""
