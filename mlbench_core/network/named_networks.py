"""Networks with names: their descriptions, and the sources of their figures."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from mlbench_core.network.description import Network
from mlbench_core.network.parsing import load_network, parse_network

__all__ = ["NETWORKS", "NamedNetwork", "get_network"]


@dataclass(frozen=True)
class NamedNetwork:
    """A network with a name.

    Attributes:
        text: Its description, for :func:`~mlbench_core.network.parsing.parse_network`.
        title: One line.
        source: The sources of its figures.
    """

    text: str
    title: str
    source: str

    @property
    def network(self) -> Network:
        """The described network."""
        return parse_network(self.text)


_ETHERNET = "bandwidth: IEEE 802.3"
_VERIZON = "round trip: promise of Verizon's service level agreement for its backbone"
_DILOCO = "of the links measured between training sites in OpenDiLoCo, arXiv 2407.07852"
_SAME_ROOM = "round trip: that of the emulation, about 0.1 ms"
_WEBPAGETEST = "bandwidth and round trip: connection profile LTE of WebPageTest"

NETWORKS: dict[str, NamedNetwork] = {
    "hpc-roce": NamedNetwork(
        "unlimited",
        "The limit of this machine, in place of RDMA in a cluster",
        (
            "none: no limit and no delay are added, and this machine has less bandwidth than RoCE "
            "at 100 Gbit/s"
        ),
    ),
    "lan-10g": NamedNetwork(
        "10gbit",
        "One switch with 10 Gbit/s Ethernet",
        f"{_ETHERNET}ae and 802.3an (10 Gbit/s); {_SAME_ROOM}",
    ),
    "lan-1g": NamedNetwork(
        "1gbit", "One switch with gigabit Ethernet", f"{_ETHERNET}ab (1 Gbit/s); {_SAME_ROOM}"
    ),
    "lan-100m": NamedNetwork(
        "100mbit", "One switch with fast Ethernet", f"{_ETHERNET}u (100 Mbit/s); {_SAME_ROOM}"
    ),
    "datacenter": NamedNetwork(
        "1gbit,0.5ms",
        "Two machines of one data center",
        f"{_ETHERNET}ab; round trip: 'Numbers everyone should know', J. Dean, LADIS 2009 (0.5 ms)",
    ),
    "two-racks": NamedNetwork(
        "2x2:1gbit/250mbit",
        "Two racks of two machines, whose uplinks are oversubscribed 8 to 1",
        f"{_ETHERNET}ab; oversubscription: Al-Fares et al., SIGCOMM 2008 (2.5:1 to 8:1 is typical)",
    ),
    "two-sites": NamedNetwork(
        "2x2:1gbit/127mbit,90ms",
        "Two local networks of two machines on two sides of the Atlantic",
        "inside as lan-1g; between as wan-transatlantic",
    ),
    "wan-europe": NamedNetwork(
        "500mbit,30ms",
        "Machines in several countries of Europe",
        (
            f"bandwidth: within the range {_DILOCO} (127 to 935 Mbit/s); {_VERIZON} within Europe "
            "(30 ms)"
        ),
    ),
    "wan-continent": NamedNetwork(
        "935mbit,45ms",
        "Machines in several states of North America",
        f"bandwidth: the fastest {_DILOCO} (935 Mbit/s); {_VERIZON} within North America (45 ms)",
    ),
    "wan-transatlantic": NamedNetwork(
        "127mbit,90ms",
        "Machines in North America and Europe",
        (
            f"bandwidth: the slowest {_DILOCO} (127 Mbit/s); {_VERIZON} between London and New "
            "York (90 ms)"
        ),
    ),
    "wan-transpacific": NamedNetwork(
        "127mbit,160ms",
        "Machines in North America and East Asia",
        f"bandwidth: the slowest {_DILOCO} (127 Mbit/s); {_VERIZON} across the Pacific (160 ms)",
    ),
    "home-fibre": NamedNetwork(
        "100mbit,20ms",
        "Machines in several homes with optical fiber",
        "bandwidth: the benchmark of the FCC for fixed broadband since 2024 (100 Mbit/s "
        "download), here in both directions; round trip: chosen by this project for homes of one "
        "region",
    ),
    "mobile-lte": NamedNetwork(
        "12mbit,70ms", "Machines in a mobile network of the fourth generation", _WEBPAGETEST
    ),
    "satellite-leo": NamedNetwork(
        "100mbit,50ms,10ms-jitter,0.4%-loss",
        "Machines behind satellites in low orbits",
        "bandwidth, round trip and loss: rounded after Michel et al., 'A first look at "
        "Starlink performance', IMC 2022; jitter: chosen by this project",
    ),
}
"""The networks that ``mlbench network list`` shows, by name."""


def get_network(text: str) -> Network:
    """Return a network by its name, its TOML file or its text.

    Args:
        text: A name of :data:`NETWORKS`, the path of a file that ends with ``.toml``, or a
            description for :func:`~mlbench_core.network.parsing.parse_network`.

    Returns:
        The network.

    Raises:
        ValueError: No network has this name, or a part of the description is wrong.
        ConfigurationError: The file cannot be read or used.

    Example:
        >>> str(get_network("wan-transatlantic"))
        '127mbit,90ms'
    """
    text = text.strip()
    if text in NETWORKS:
        return NETWORKS[text].network
    if text.endswith(".toml"):
        return load_network(Path(text))
    if re.fullmatch(r"[A-Za-z][\w-]*", text) and text.lower() != "unlimited":
        hint = "'mlbench network list' shows the names"
        similar = difflib.get_close_matches(text.lower(), NETWORKS, 1)
        if similar:
            hint = f"did you mean {similar[0]!r}?"
        raise ValueError(
            "network must be a name, a .toml file or a text such as '100mbit,20ms', not "
            f"{text!r}: {hint}"
        )
    return parse_network(text)
