"""Emulate several hosts, and the links between them, on one machine."""

from __future__ import annotations

from mlbench_core.network.description import Network, bits_per_second
from mlbench_core.network.emulated import EmulatedNetwork
from mlbench_core.network.named_networks import NETWORKS, get_network
from mlbench_core.network.parsing import load_network, parse_network

__all__ = [
    "NETWORKS",
    "EmulatedNetwork",
    "Network",
    "bits_per_second",
    "get_network",
    "load_network",
    "parse_network",
]
