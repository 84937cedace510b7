"""Emulate several hosts, and the links between them, on one machine."""

from __future__ import annotations

from mlbench_core.network.emulated import EmulatedNetwork, bits_per_second

__all__ = ["EmulatedNetwork", "bits_per_second"]
