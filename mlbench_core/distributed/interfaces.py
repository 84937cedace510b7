"""Find the network interface that leads to the other workers.

Gloo listens on the address to which the machine's own name resolves. On many machines that is
127.0.1.1, or an address in the wrong one of several networks, and workers of other machines cannot
connect. The interface that leads to rank 0's address is the right one.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from collections.abc import Mapping

from mlbench_core.addresses import is_loopback

__all__ = ["interface_towards", "interface_variables", "own_addresses", "resolves"]

# NCCL takes a name for the beginning of several names, unless "=" precedes it.
_VARIABLES = {"GLOO_SOCKET_IFNAME": "{}", "TP_SOCKET_IFNAME": "{}", "NCCL_SOCKET_IFNAME": "={}"}
# The port does not matter, because nothing is sent to it (RFC 863 reserves 9 for discarded data).
_DISCARD_PORT = 9


def interface_variables(
    address: str | None, environment: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return environment variables that lead Gloo, TensorPipe and NCCL to an address's interface.

    Args:
        address: Host or address of rank 0; None for a worker alone.
        environment: The environment variables; by default those of this process. Variables set
            there stay.

    Returns:
        The variables to set. There are none if the interface is unknown. Workers of one machine
        that meet on the loopback interface stay on it, so no other machine can connect to them.

    Example:
        >>> interface_variables(None)
        {}
    """
    if environment is None:
        environment = os.environ
    missing = [name for name in _VARIABLES if not environment.get(name)]
    if not address or not missing:
        return {}
    interface = interface_towards(address)
    if interface is None:
        return {}
    return {name: _VARIABLES[name].format(interface) for name in missing}


def interface_towards(address: str) -> str | None:
    """Return the network interface through which this machine reaches another one.

    Nothing is sent: connecting a datagram socket only asks the system for the route.

    Args:
        address: Host name or IP address; one of this machine's own is reached through the interface
            that has it.

    Returns:
        The interface's name, for example ``"eth0"``; None for an unknown host.
    """
    with contextlib.suppress(OSError):
        routes = socket.getaddrinfo(address, _DISCARD_PORT, type=socket.SOCK_DGRAM)
        for family, kind, protocol, _, target in routes:
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                # The kernel chooses the route here and with it the local address.
                probe.connect(target)
                local = probe.getsockname()[0]
                import psutil

                for name, entries in psutil.net_if_addrs().items():
                    if local in [entry.address for entry in entries]:
                        return name
                return None
    return None


def resolves(host: str) -> bool:
    """Return True if this machine knows an address for a host.

    Args:
        host: Host name or IP address.

    Example:
        >>> resolves("127.0.0.1"), resolves("no-such-host.invalid")
        (True, False)
    """
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError):
        return False
    return True


def own_addresses() -> list[str]:
    """Return IP addresses at which others may reach this machine: IPv4 first, no loopback.

    Example:
        >>> "127.0.0.1" in own_addresses()
        False
    """
    import psutil

    addresses: dict[int, list[str]] = {socket.AF_INET: [], socket.AF_INET6: []}
    for entry in itertools.chain.from_iterable(psutil.net_if_addrs().values()):
        # An interface also has entries of other families, such as its hardware address.
        if entry.family in addresses and not is_loopback(entry.address):
            addresses[entry.family].append(entry.address)
    return [*addresses[socket.AF_INET], *addresses[socket.AF_INET6]]
