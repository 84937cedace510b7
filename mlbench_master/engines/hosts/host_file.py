"""Read the hosts of a run.

Host files have the form of those of MPI and DeepSpeed. The options are those of the engine hosts.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from mlbench_master.engines.logs import open_at_once

__all__ = [
    "HOSTFILE_VARIABLE",
    "Host",
    "HostOptions",
    "Share",
    "parse_hosts",
    "read_options",
    "share_slots",
]

HOSTFILE_VARIABLE = "MLBENCH_HOSTFILE"
"""The variable with the path of the host file for runs that name no hosts."""

_FOLDER = "~/.cache/mlbench/hosts"
# A run may name any path, for example of a file that never ends.
_FILE_BYTES = 2**20
# It must not look like an option of ssh.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.%-]*")
_BRACKETS = re.compile(r"[^:]*\[[^\]]*\](:[^:]*)?")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@%\\+-]*")
_MOST_SLOTS = 1024


@dataclass(frozen=True)
class Host:
    """A machine for workers.

    Attributes:
        name: The name that ssh gets, also ``user@name``.
        slots: Number of workers that it can run at the same time.
        address: The address at which other hosts reach it; empty for the one that ssh uses.
    """

    name: str
    slots: int = 1
    address: str = ""


@dataclass(frozen=True)
class HostOptions:
    """The engine options of a run.

    Attributes:
        hosts: The hosts in the order in which they get workers.
        python: Path of Python on each host.
        folder: Folder for the run on each host.
    """

    hosts: tuple[Host, ...]
    python: str
    folder: str

    @property
    def slots(self) -> int:
        """Return the number of slots of all hosts."""
        return sum(host.slots for host in self.hosts)


@dataclass(frozen=True)
class Share:
    """The slots of one host that a run gets.

    Attributes:
        host: The host.
        slots: The slots, from 0.
        first_rank: The rank of the worker in the first of them; the others follow.
    """

    host: Host
    slots: tuple[int, ...]
    first_rank: int


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise an error instead of ending the master."""
        raise ValueError(
            f"engine_options: {message}; the options are --hostfile, --host, --python and --folder"
        )


def read_options(words: Sequence[str]) -> HostOptions:
    """Read the engine options of a run, with the host file that they name.

    Args:
        words: The words of the options.

    Returns:
        The options; the hosts are those of ``MLBENCH_HOSTFILE`` if none are named.

    Raises:
        ValueError: An option or the host file is wrong, or there are no hosts.

    Example:
        >>> options = read_options(["--host", "a:2,b"])
        >>> options.hosts
        (Host(name='a', slots=2, address=''), Host(name='b', slots=1, address=''))
        >>> options.slots
        3
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--hostfile")
    group.add_argument("--host")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--folder", default=_FOLDER)
    options = parser.parse_args(list(words))
    # The folder in which a login begins may differ from host to host.
    for name, begin in (("python", "/"), ("folder", ("/", "~/"))):
        value = getattr(options, name)
        if not value.startswith(begin):
            raise ValueError(
                f"engine_options: --{name} must be an absolute path on the hosts, not "
                f"{value[:80]!r}"
            )
    hosts = _hosts(options.host, options.hostfile)
    return HostOptions(hosts, options.python, options.folder)


def _hosts(listed: str | None, hostfile: str | None) -> tuple[Host, ...]:
    if listed is not None:
        return parse_hosts(list(map(_line_of, listed.split(","))), "--host", "part")
    path = hostfile or os.environ.get(HOSTFILE_VARIABLE, "")
    if not path:
        raise ValueError(
            "engine_options: --hostfile or --host must be given: write a file with a line such "
            "as 'node1 slots=4' for each host, and name it, "
            f"or set {HOSTFILE_VARIABLE} before the master starts"
        )
    file = Path(path).expanduser().absolute()
    try:
        with open_at_once(file) as content:
            # Editors on Windows begin a file with a mark.
            text = content.read(_FILE_BYTES).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why: str | None = "it is not text"
        if isinstance(error, OSError):
            why = error.strerror
        raise ValueError(
            f"engine_options: the master cannot read the host file {file}: {why}"
        ) from error
    return parse_hosts(text.splitlines(), str(file), "line")


def _line_of(part: str) -> str:
    """Return the line of a host file for a part of ``--host``, such as ``a:2``."""
    part = part.strip()
    if part.count(":") > 1 and not _BRACKETS.fullmatch(part):
        raise ValueError(
            f"engine_options: --host: an IPv6 address must be in brackets, not {part[:60]!r}: "
            "its last group could be a number of slots; write for example [2001:db8::5] or "
            "[2001:db8::5]:2"
        )
    name, colon, slots = part.rpartition(":")
    if not colon or part.endswith("]"):
        return part
    return f"{name} slots={slots}"


def parse_hosts(lines: Sequence[str], source: str, unit: str = "line") -> tuple[Host, ...]:
    """Parse the lines of a host file.

    Args:
        lines: Lines such as ``node1 slots=4 address=10.0.0.1  # comment``.
        source: The name of the file, for errors.
        unit: The word for a line, for errors.

    Returns:
        The hosts in the order of the file.

    Raises:
        ValueError: A line is wrong; the message has its number.

    Example:
        >>> parse_hosts(["# two machines", "", "a slots=4", "me@b address=10.0.0.2"], "hosts")
        (Host(name='a', slots=4, address=''), Host(name='me@b', slots=1, address='10.0.0.2'))
    """
    hosts: dict[str, Host] = {}
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            host = _parse_host(words)
            if host.name in hosts:
                raise ValueError(
                    f"each host must have one {unit}, not {host.name!r} again: add up its slots"
                )
        except ValueError as error:
            raise ValueError(f"engine_options: {source}, {unit} {number}: {error}") from None
        hosts[host.name] = host
    if not hosts:
        raise ValueError(
            f"engine_options: {source} must name at least one host: "
            "add a line such as 'node1 slots=4'"
        )
    return tuple(hosts.values())


def _parse_host(words: Sequence[str]) -> Host:
    name, *rest = words
    name = _parse_name(name)
    slots, address = 1, ""
    for word in rest:
        key, _, value = word.partition("=")
        if key == "slots":
            # isdecimal() accepts the digits of all scripts, and int() refuses thousands of digits
            # with a message of its own.
            is_number = value.isascii() and value.isdecimal() and len(value) < 6
            if not (is_number and 1 <= int(value) <= _MOST_SLOTS):
                raise ValueError(
                    f"slots must be from 1 to {_MOST_SLOTS}, not {value[:40]!r}: write for "
                    "example slots=4"
                )
            slots = int(value)
        elif key == "address" and value:
            if "@" in value:
                raise ValueError(
                    f"address must be an IP address without a user, not {value[:60]!r}: write the "
                    "user before the name, as in me@node1"
                )
            address = _parse_name(value)
        else:
            raise ValueError(
                f"after the name must come slots=N or address=IP, not {word[:40]!r}: leave it out"
            )
    return Host(name, slots, address)


def _parse_name(name: str) -> str:
    """Return the name of a host, or its address without brackets, as ssh and torch take it."""
    # The last @ separates them: the user of a domain has one in the name, too.
    user, at, host = name.rpartition("@")
    has_brackets = host.startswith("[") and host.endswith("]")
    if has_brackets or ":" in host:
        if has_brackets:
            host = host[1:-1]
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise ValueError(
                "a name with colons must be an IPv6 address such as [2001:db8::5], not "
                f"{name[:60]!r}: write the number of slots as slots=4"
            ) from None
    elif not _NAME.fullmatch(host):
        raise ValueError(
            f"the name must be one that ssh knows, not {name[:40]!r}: "
            "begin the line with the host's name"
        )
    if at and not _USER.fullmatch(user):
        raise ValueError(
            f"the user must be one that ssh knows, not {user[:40]!r}: write for example me@node1"
        )
    return f"{user}{at}{host}"


def share_slots(
    hosts: Sequence[Host], num_workers: int, taken: Mapping[str, set[int]]
) -> list[Share]:
    """Give a run free slots in the order of the hosts.

    Args:
        hosts: The hosts.
        num_workers: Number of workers.
        taken: Slots of other runs by the name of their host.

    Returns:
        The slots of each host with workers; fewer than ``num_workers`` slots if too few are free.

    Example:
        >>> first, second = share_slots([Host("a", 2), Host("b", 4)], 3, {"a": {0}})
        >>> first.host.name, first.slots, first.first_rank
        ('a', (1,), 0)
        >>> second.host.name, second.slots, second.first_rank
        ('b', (0, 1), 1)
    """
    shares: list[Share] = []
    rank = 0
    for host in hosts:
        taken_here = taken.get(host.name, ())
        free = [slot for slot in range(host.slots) if slot not in taken_here]
        # The first hosts are filled first, so that the ranks on a host follow each other.
        slots = tuple(free[: num_workers - rank])
        if slots:
            shares.append(Share(host, slots, rank))
            rank += len(slots)
    return shares
