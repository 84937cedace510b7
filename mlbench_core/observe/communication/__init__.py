"""Observe what the workers of a script send to each other, and how long they wait for it."""
