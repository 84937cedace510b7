"""Compare algorithms on networks: one file describes all runs, and one folder holds their results."""
