"""Observe the messages of a script's workers, and the time that they wait for them."""
