"""Keep runs and metrics in SQLite or PostgreSQL."""
