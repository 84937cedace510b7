"""Start runs, follow them, and record how they end."""
