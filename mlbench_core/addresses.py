"""Recognize host names and addresses."""

from __future__ import annotations

import ipaddress

__all__ = ["bracketed", "is_loopback"]


def bracketed(host: str) -> str:
    """Put an IPv6 address into the brackets that a URL needs; return other hosts unchanged.

    Example:
        >>> bracketed("::1"), bracketed("127.0.0.1")
        ('[::1]', '127.0.0.1')
    """
    return f"[{host}]" if ":" in str(host) else host


def is_loopback(host: str) -> bool:
    """Return True if a host name or address can only mean this machine.

    Args:
        host: For example ``"127.0.0.1"``, ``"[::1]"`` or ``"localhost"``.

    Returns:
        True for loopback addresses, ``localhost`` and names below ``.localhost`` (RFC 6761).

    Example:
        >>> is_loopback("127.0.0.1"), is_loopback("0.0.0.0")
        (True, False)
    """
    # An IPv6 address has brackets in a URL, and a name may end with the dot of the root domain.
    name = host.strip("[]").rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
