"""Optimizers that send gradients or updates in a compressed form."""
