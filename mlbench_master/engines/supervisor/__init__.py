"""Run the processes of one job to their end, apart from the master."""
