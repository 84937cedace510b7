"""Describe a network as data: links, racks, and hosts that differ from the others."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

__all__ = [
    "MAX_HOSTS",
    "Cut",
    "HostSettings",
    "Kill",
    "Link",
    "Network",
    "Outage",
    "Pause",
    "RandomOutages",
    "bits_per_second",
]

MAX_HOSTS = 250
"""The largest number of hosts of a network: they share one subnet of 254 addresses."""

_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
NUMBER = r"\d+(?:\.\d+)?"
_OTHER_BANDWIDTH = re.compile(
    rf"({NUMBER})\s*([kmgt]?)i?(bits?|bytes?|b|)\s*(ps|/s|/sec|/second|p/s|)"
)
BANDWIDTH = re.compile(rf"({NUMBER})\s*([kmg]?bit)")
UNLIMITED = "unlimited"
_LONGEST_ROUND_TRIP_S = 10.0
# Below this share, a worker would hardly answer before the timeouts of its process group.
_LEAST_CPU = 0.01
_MOST_LOSS = 0.5
_LEAST_MEAN_S = 0.1


@dataclass(frozen=True)
class Link:
    """The properties of a kind of link.

    Attributes:
        bandwidth: Bits per second in each direction; None for no limit.
        round_trip_s: Time from one host to another and back, in seconds, in addition to that of
            this machine.
        jitter_s: Largest deviation of a round trip from ``round_trip_s``, in seconds.
        loss: Probability from 0 to 0.5 that a frame is lost on its way from one host to another.

    Example:
        >>> str(Link(100_000_000, 0.02))
        '100mbit,20ms'
    """

    bandwidth: int | None
    round_trip_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.round_trip_s <= _LONGEST_ROUND_TRIP_S:
            raise ValueError(
                f"round trip must be from 0 to {_LONGEST_ROUND_TRIP_S:g} s, not "
                f"{self.round_trip_s:g} s: reduce the delay"
            )
        if not 0 <= self.jitter_s <= self.round_trip_s:
            raise ValueError(
                f"jitter must be from 0 to the round trip ({_time_text(self.round_trip_s)}), "
                f"not {_time_text(self.jitter_s)}: reduce the jitter"
            )
        if not 0 <= self.loss <= _MOST_LOSS:
            raise ValueError(
                f"loss must be from 0% to {_MOST_LOSS:.0%}, not {self.loss:.6g}: reduce the loss"
            )

    def __str__(self) -> str:
        """Return the text that :func:`~mlbench_core.network.parsing.parse_network` reads."""
        words = [_bandwidth_text(self.bandwidth)]
        if self.round_trip_s:
            words.append(_time_text(self.round_trip_s))
        if self.jitter_s:
            words.append(f"{_time_text(self.jitter_s)}-jitter")
        if self.loss:
            words.append(f"{_number_text(self.loss * 100)}%-loss")
        return ",".join(words)


@dataclass(frozen=True)
class Outage:
    """A time in which a host takes no part, in seconds after the start of the network.

    Attributes:
        start_s: Its start.
        end_s: Its end; None if the host does not come back.
    """

    word: ClassVar[str]

    start_s: float
    end_s: float | None = None

    def __post_init__(self) -> None:
        if self.end_s is not None and not self.end_s > self.start_s:
            raise ValueError(
                f"{self.word} must end after its start, not at {_time_text(self.end_s)}: write "
                f"for example '{self.word}@10s-15s'"
            )

    def __str__(self) -> str:
        """Return the text that :func:`~mlbench_core.network.parsing.parse_network` reads."""
        text = f"{self.word}@{_time_text(self.start_s)}"
        if self.end_s is not None:
            text += f"-{_time_text(self.end_s)}"
        return text


class Cut(Outage):
    """A time in which the link of a host is cut."""

    word = "cut"


class Kill(Outage):
    """The loss of a host: all of its processes are killed, and none starts before the end."""

    word = "kill"


class Pause(Outage):
    """A time in which all processes of a host are stopped."""

    word = "pause"


@dataclass(frozen=True)
class RandomOutages:
    """Outages of every host, at random times.

    The time from the start of the network, or from the end of a host's last outage, to its next
    outage has an exponential distribution. Every host has its own random numbers, which depend on
    nothing but the seed, so the same network fails at the same times again.

    Attributes:
        mean_s: Mean of these times, the mean time between failures, in seconds.
        repair_s: Length of each outage, in seconds; 0 if the host is back at once.
        seed: Seed of the random numbers.
    """

    mean_s: float
    repair_s: float = 0.0
    seed: int = 1

    def __post_init__(self) -> None:
        if not self.mean_s >= _LEAST_MEAN_S:
            raise ValueError(
                f"mtbf must be at least {_time_text(_LEAST_MEAN_S)}, not {_time_text(self.mean_s)}"
            )

    def times(self, kind: type[Outage], host: int) -> Iterator[tuple[float, float]]:
        """Yield the start and the end of each outage of a host, without end.

        Args:
            kind: The kind of the outages: two kinds have different times.
            host: The host.
        """
        # A string as the seed gives the same numbers in every process. The hash of a tuple with a
        # string would not.
        numbers = random.Random(f"{kind.word} {self.seed} {host}")
        end_s = 0.0
        while True:
            start_s = end_s + numbers.expovariate(1 / self.mean_s)
            end_s = start_s + self.repair_s
            yield start_s, end_s

    def __str__(self) -> str:
        """Return the text that :func:`~mlbench_core.network.parsing.parse_network` reads."""
        words = [f"{_time_text(self.mean_s)}-mtbf"]
        if self.repair_s:
            words.append(f"{_time_text(self.repair_s)}-repair")
        return ",".join([*words, f"{self.seed}-seed"])


@dataclass(frozen=True)
class HostSettings:
    """The differences of one host from the others.

    Attributes:
        bandwidth: Bits per second of its link in each direction; None for the bandwidth of the
            other links.
        cpu: Share of the processor time of its workers, from 0.01 to 1; a straggler has less than
            1.
        cuts: Times in which its link is cut.
        kills: Times in which it is lost.
        pauses: Times in which its processes are stopped.
        join_s: Seconds after the start of the network at which it joins.
    """

    bandwidth: int | None = None
    cpu: float = 1.0
    cuts: tuple[Cut, ...] = ()
    kills: tuple[Kill, ...] = ()
    pauses: tuple[Pause, ...] = ()
    join_s: float = 0.0

    def __post_init__(self) -> None:
        if not _LEAST_CPU <= self.cpu <= 1:
            raise ValueError(
                f"cpu must be from {_LEAST_CPU:.0%} to 100%, not {self.cpu:.6g}: choose "
                "another share"
            )

    def __str__(self) -> str:
        """Return the text that :func:`~mlbench_core.network.parsing.parse_network` reads."""
        words = []
        if self.bandwidth is not None:
            words.append(_bandwidth_text(self.bandwidth))
        if self.cpu < 1:
            words.append(f"{_number_text(self.cpu * 100)}%-cpu")
        if self.join_s:
            words.append(f"join@{_time_text(self.join_s)}")
        return ",".join([*words, *map(str, (*self.cuts, *self.kills, *self.pauses))])


@dataclass(frozen=True)
class Network:
    """A network: equal links to one switch, or racks of hosts that are connected by other links.

    Attributes:
        link: The link from each host to its switch. Its round trip is that of two hosts of one
            switch.
        between: The link from the switch of each rack to the core; None for one switch. Its round
            trip is that of two hosts of different racks.
        racks: Number of racks; 1 for one switch.
        hosts_per_rack: Hosts of each rack; None for any number of hosts at one switch.
        hosts: Hosts that differ from the others, by their numbers from 0.
        kills: Times at which hosts are lost; None for never.
        pauses: Times at which the processes of hosts are stopped; None for never.

    Example:
        >>> network = Network(Link(10**10), Link(10**8, 0.04), racks=2, hosts_per_rack=2)
        >>> network.num_hosts, network.rack_of(3), str(network)
        (4, 1, '2x2:10gbit/100mbit,40ms')
    """

    link: Link
    between: Link | None = None
    racks: int = 1
    hosts_per_rack: int | None = None
    hosts: Mapping[int, HostSettings] = field(default_factory=dict)
    kills: RandomOutages | None = None
    pauses: RandomOutages | None = None

    def __post_init__(self) -> None:
        if self.between is not None:
            if not self.racks >= 2:
                raise ValueError(
                    f"racks must be at least 2, not {self.racks}: for one switch leave the "
                    "racks out"
                )
            if self.hosts_per_rack is None or not self.hosts_per_rack >= 1:
                raise ValueError(
                    f"hosts of a rack must be at least 1, not {self.hosts_per_rack}: write 2x2"
                )
            if self.link.round_trip_s > self.between.round_trip_s:
                raise ValueError(
                    "round trip between racks must be at least that inside of a rack, "
                    f"not {_time_text(self.between.round_trip_s)}: increase it"
                )
        if (self.num_hosts or 0) > MAX_HOSTS:
            raise ValueError(
                f"hosts must be at most {MAX_HOSTS}, not {self.num_hosts}: reduce the racks"
            )
        last = (self.num_hosts or MAX_HOSTS) - 1
        for host in self.hosts:
            if not 0 <= host <= last:
                raise ValueError(f"host must be from 0 to {last}, not {host}")
        if self.pauses is not None and not self.pauses.repair_s:
            raise ValueError(
                "pauses must have the time of a repair: write for example "
                f"'pauses: {_time_text(self.pauses.mean_s)}-mtbf,2s-repair'"
            )

    @property
    def num_hosts(self) -> int | None:
        """The number of hosts; None if the network can have any number."""
        if self.between is None or self.hosts_per_rack is None:
            return None
        return self.racks * self.hosts_per_rack

    def check_hosts(self, hosts: int) -> None:
        """Check that the network can have a number of hosts.

        Raises:
            ValueError: The network has another number of hosts, or describes hosts that would not
                exist.
        """
        if self.num_hosts is not None and hosts != self.num_hosts:
            raise ValueError(
                f"hosts must be {self.num_hosts} ({self.racks} racks of {self.hosts_per_rack}), "
                f"not {hosts}: choose another number, or another network"
            )
        if not 1 <= hosts <= MAX_HOSTS:
            raise ValueError(f"hosts must be from 1 to {MAX_HOSTS}, not {hosts}")
        highest = max(self.hosts, default=0)
        if highest >= hosts:
            raise ValueError(
                f"hosts must be at least {highest + 1}, not {hosts}: the network describes "
                f"host {highest}"
            )

    def rack_of(self, host: int) -> int:
        """Return the rack of a host."""
        if self.hosts_per_rack is None:
            return 0
        return host // self.hosts_per_rack

    def path(self, source: int, target: int) -> Link:
        """Return the properties of the way between two hosts.

        They are the lowest bandwidth on the way, and the delay, jitter and loss.

        Example:
            >>> str(Network(Link(10**10), Link(10**8, 0.04), racks=2, hosts_per_rack=2).path(0, 3))
            '100mbit,40ms'
        """
        way, limits = self.link, [self._bandwidth_of(source), self._bandwidth_of(target)]
        if self.between is not None and self.rack_of(source) != self.rack_of(target):
            way = self.between
            limits.append(way.bandwidth)
        finite = [limit for limit in limits if limit is not None]
        return Link(min(finite, default=None), way.round_trip_s, way.jitter_s, way.loss)

    def _bandwidth_of(self, host: int) -> int | None:
        if host in self.hosts and self.hosts[host].bandwidth is not None:
            return self.hosts[host].bandwidth
        return self.link.bandwidth

    def __str__(self) -> str:
        """Return the text that :func:`~mlbench_core.network.parsing.parse_network` reads."""
        text = str(self.link)
        if self.between is not None:
            text = f"{self.racks}x{self.hosts_per_rack}:{text}/{self.between}"
        for number in sorted(self.hosts):
            if self.hosts[number] != HostSettings():
                text += f"; host{number}: {self.hosts[number]}"
        for name, outages in (("kills", self.kills), ("pauses", self.pauses)):
            if outages is not None:
                text += f"; {name}: {outages}"
        return text


def bits_per_second(bandwidth: str | float) -> int:
    """Convert a bandwidth to bits per second.

    Args:
        bandwidth: Bits per second as a number, or a number with the unit ``bit``, ``kbit``,
            ``mbit`` or ``gbit`` (powers of 1000, as in ``tc``).

    Returns:
        Bits per second.

    Raises:
        ValueError: ``bandwidth`` has another form, or is not from 8 kbit/s (less than one packet
            per second) to 1000 Gbit/s.

    Example:
        >>> bits_per_second("100mbit")
        100000000
    """
    match = BANDWIDTH.fullmatch(str(bandwidth).strip().lower())
    if match:
        rate = float(match[1]) * _UNITS[match[2]]
    elif isinstance(bandwidth, (int, float)) and not isinstance(bandwidth, bool):
        rate = float(bandwidth)
    else:
        raise ValueError(
            f"bandwidth must be like '100mbit' or a number of bits per second, not {bandwidth!r}"
            + bandwidth_hint(str(bandwidth))
        )
    if not 8_000 <= rate <= 1e12:
        raise ValueError(f"bandwidth must be from 8 kbit/s to 1000 Gbit/s, not {bandwidth!r}")
    return round(rate)


def bandwidth_hint(text: str) -> str:
    """Return ``": did you mean '1gbit'?"`` for a bandwidth in another unit, or an empty text.

    Example:
        >>> bandwidth_hint("1gbps"), bandwidth_hint("100 MB/s"), bandwidth_hint("fast")
        (": did you mean '1gbit'?", ": did you mean '100mbit', or '800mbit' for bytes?", '')
    """
    match = _OTHER_BANDWIDTH.fullmatch(text.strip().lower())
    if match is None:
        return ""
    number, prefix, unit, per = match.groups()
    if prefix == "t":
        number, prefix = _number_text(float(number) * 1000), "g"
    if not prefix and not unit:
        # A number alone is rather in Mbit/s than in bits.
        prefix = "m"
    bits, in_bytes = f"{number}{prefix}bit", f"{_number_text(float(number) * 8)}{prefix}bit"
    if unit.startswith("byte"):
        return f": did you mean {in_bytes!r}?"
    if unit == "b" and per != "ps":
        # The case of the letters does not count here, so MB may be Mb.
        return f": did you mean {bits!r}, or {in_bytes!r} for bytes?"
    return f": did you mean {bits!r}?"


def _bandwidth_text(rate: int | None) -> str:
    if rate is None:
        return UNLIMITED
    unit = next(unit for unit in reversed(_UNITS) if rate >= _UNITS[unit])
    short = f"{_number_text(rate / _UNITS[unit])}{unit}"
    # A rate that needs more digits is written in bits, so that the text gives the same network.
    if bits_per_second(short) != rate:
        return f"{rate}bit"
    return short


def _time_text(seconds: float) -> str:
    if seconds >= 1:
        return f"{_number_text(seconds)}s"
    return f"{_number_text(seconds * 1e3)}ms"


def _number_text(number: float) -> str:
    # Seven digits, because times are rounded to 1e-7 s; see _seconds() in parsing.py.
    return f"{number:.7f}".rstrip("0").rstrip(".")
