"""The revisions of the tables; each leads from the one before it to its own."""
