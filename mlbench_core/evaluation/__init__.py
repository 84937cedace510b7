"""Evaluate runs: goals and communication times (no framework), metrics, and measurement of collectives."""

from mlbench_core._lazy import lazy_subpackages

__getattr__ = lazy_subpackages(__name__, "goals", "latency", "pytorch")
