"""Aggregations of workers that train alone for several steps before they average."""
