"""Measure a training script without editing it."""
