"""Talk to the master: ask it for runs and metrics, and deliver metrics to it."""
