"""The folder that every run leaves: raw lines, environment and summary."""
