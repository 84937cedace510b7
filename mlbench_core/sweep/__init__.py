"""Compare algorithms on networks: one file describes the runs, and one folder has the results."""
