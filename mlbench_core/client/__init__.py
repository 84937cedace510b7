"""The client of the master."""
