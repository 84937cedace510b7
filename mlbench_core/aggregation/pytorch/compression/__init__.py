"""Aggregations that send gradients in a compressed form."""
