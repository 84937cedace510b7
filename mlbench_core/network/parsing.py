"""Read the description of a network: a short text, or a TOML file.

Both give a :class:`~mlbench_core.network.description.Network`. The page "Train on an emulated
network" of the documentation has the grammar.
"""

from __future__ import annotations

import itertools
import operator
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from mlbench_core.errors import ConfigurationError
from mlbench_core.files import read_text
from mlbench_core.network.description import (
    BANDWIDTH,
    NUMBER,
    UNLIMITED,
    Cut,
    HostSettings,
    Kill,
    Link,
    Network,
    Outage,
    Pause,
    RandomOutages,
    bandwidth_hint,
    bits_per_second,
)

__all__ = ["load_network", "parse_network"]

_TIME_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_TIME = re.compile(rf"({NUMBER})(us|ms|s)")
_PERCENT = re.compile(rf"({NUMBER})%")
_LONGEST_TIME_S = 1e6
_LONGEST_TEXT = 2000
_LARGEST_SEED = 2**32 - 1
_OUTAGES: tuple[type[Outage], ...] = (Cut, Kill, Pause)

OutageKind = TypeVar("OutageKind", bound=Outage)


def parse_network(text: str) -> Network:
    """Read the text of a network.

    Args:
        text: For example ``"100mbit,20ms"``, ``"100mbit,20ms,2ms-jitter,0.1%-loss"``,
            ``"2x2:10gbit/100mbit,40ms"``, ``"1gbit; host1: 10mbit; host2: 50%-cpu; host0:
            cut@10s-15s"`` or ``"1gbit; kills: 60s-mtbf,10s-repair,1-seed"``.

    Returns:
        The network.

    Raises:
        ValueError: The text has another form; the message names the part.

    Example:
        >>> parse_network("100mbit, 20ms").link
        Link(bandwidth=100000000, round_trip_s=0.02, jitter_s=0.0, loss=0.0)
    """
    if len(text) > _LONGEST_TEXT:
        raise ValueError(f"network must have at most {_LONGEST_TEXT} characters, not {len(text)}")
    links, *differences = (part.strip() for part in text.lower().split(";"))
    racks, hosts_per_rack, between = 1, None, None
    match = re.fullmatch(r"(\d{1,4})\s*x\s*(\d{1,4})\s*:(.*)", links, re.DOTALL)
    if match:
        racks, hosts_per_rack = int(match[1]), int(match[2])
        inside, slash, outside = match[3].partition("/")
        if not slash:
            raise ValueError(
                f"network {links!r} must have a link between the racks after '/': write for "
                f"example '{racks}x{hosts_per_rack}:10gbit/100mbit,40ms'"
            )
        link, between = _parse_link(inside), _parse_link(outside)
    # The slash of a unit such as MB/s. The error of the link names the unit that was meant.
    elif "/" in links and any(map(bandwidth_hint, links.split(","))):
        link = _parse_link(links)
    elif "/" in links or ":" in links:
        raise ValueError(
            f"network {links[:80]!r} must begin with the racks and the hosts of each if it has "
            "'/' or ':': write for example '2x2:10gbit/100mbit,40ms'"
        )
    else:
        link = _parse_link(links)
    hosts: dict[int, HostSettings] = {}
    random: dict[str, RandomOutages] = {}
    for difference in differences:
        name, _, words = difference.partition(":")
        name = name.strip()
        if name in ("kills", "pauses"):
            if name in random:
                raise ValueError(f"{name} must be described once, not twice")
            random[name] = _parse_random(words, name)
            continue
        number, settings = _parse_host(difference)
        if number in hosts:
            raise ValueError(
                f"host {number} must be described once, not twice: put its parts together"
            )
        hosts[number] = settings
    return Network(link, between, racks, hosts_per_rack, _different(hosts), **random)


def load_network(path: Path) -> Network:
    """Read a network from a TOML file.

    Args:
        path: The file.

    Returns:
        The network.

    Raises:
        ConfigurationError: The file cannot be read, or a table or key is unknown or has a wrong
            value.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return _from_tables(tomllib.loads(read_text(path)))
    except OSError as error:
        raise ConfigurationError(
            f"cannot read the network {path}: {error.strerror or error}"
        ) from error
    # Nested brackets raise RecursionError, and a number of hundreds of digits OverflowError.
    except (ValueError, RecursionError, OverflowError) as error:
        raise ConfigurationError(f"the network {path} cannot be used: {error}") from error


def _parse_link(text: str) -> Link:
    values: dict[str, Any] = {}
    value: Any
    for word in _words(text, "link"):
        if word == UNLIMITED or BANDWIDTH.fullmatch(word):
            name, value = "bandwidth", _bandwidth(word)
        elif word.endswith("-jitter"):
            name, value = "jitter_s", _seconds(word.removesuffix("-jitter").strip(), "jitter")
        elif word.endswith("-loss"):
            name, value = "loss", _share(word.removesuffix("-loss").strip(), "loss")
        elif _TIME.fullmatch(word):
            name, value = "round_trip_s", _seconds(word, "round trip")
        else:
            raise ValueError(
                f"part {word[:80]!r} must be a bandwidth ('100mbit', '{UNLIMITED}'), a round "
                "trip ('20ms'), a jitter ('2ms-jitter') or a loss ('0.1%-loss')"
                + bandwidth_hint(word)
            )
        if name in values:
            kind = name.removesuffix("_s").replace("_", " ")
            raise ValueError(f"part {word!r} must not follow another {kind}")
        values[name] = value
    if "bandwidth" not in values:
        raise ValueError(
            f"link {text.strip()!r} must have a bandwidth: write for example '100mbit,20ms' or "
            f"'{UNLIMITED},20ms'"
        )
    return Link(**values)


def _parse_host(text: str) -> tuple[int, HostSettings]:
    """Read ``host1: 10mbit, 50%-cpu, cut@10s-15s``."""
    match = re.fullmatch(r"host\s*(\d{1,4})\s*:(.*)", text, re.DOTALL)
    if match is None:
        raise ValueError(f"part {text[:80]!r} must be like 'host1: 10mbit', after a ';'")
    values: dict[str, Any] = {}
    outages: dict[str, list[str]] = {kind.word: [] for kind in _OUTAGES}
    value: Any
    for word in _words(match[2], f"host {match[1]}"):
        event, at, times = word.partition("@")
        if at and event in outages:
            outages[event].append(times)
            continue
        if BANDWIDTH.fullmatch(word):
            name, value = "bandwidth", _bandwidth(word)
        elif word.endswith("-cpu"):
            name, value = "cpu", _share(word.removesuffix("-cpu").strip(), "cpu")
        elif at and event == "join":
            name, value = "join", _seconds(times.strip(), "join")
        else:
            raise ValueError(
                f"part {word[:80]!r} of host {match[1]} must be a bandwidth ('10mbit'), a share of "
                "the processor ('50%-cpu') or an event ('cut@10s-15s', 'kill@10s-15s', "
                "'pause@10s-15s', 'join@10s')" + bandwidth_hint(word)
            )
        if name in values:
            raise ValueError(f"part {word!r} of host {match[1]} must not follow another {name}")
        values[name] = value
    return int(match[1]), _host_settings(values, outages)


def _parse_random(text: str, name: str) -> RandomOutages:
    """Read ``60s-mtbf, 10s-repair, 1-seed``."""
    values: dict[str, Any] = {}
    for word in _words(text, name):
        value, _, key = word.rpartition("-")
        if key not in ("mtbf", "repair", "seed"):
            raise ValueError(
                f"part {word[:80]!r} of {name} must be a mean time between failures "
                "('60s-mtbf'), a time of a repair ('10s-repair') or a seed ('1-seed')"
            )
        if key in values:
            raise ValueError(f"part {word!r} of {name} must not follow another {key}")
        values[key] = value.strip()
        # Another text stays, and the check of the seed names it.
        if key == "seed" and value.strip().isdecimal():
            values[key] = int(value)
    return _random_outages(values, name)


def _words(text: str, subject: str) -> Iterator[str]:
    for word in text.split(","):
        if not word.strip():
            raise ValueError(
                f"{subject} must not have an empty part: write for example '100mbit,20ms'"
            )
        yield word.strip()


def _bandwidth(text: object) -> int | None:
    if text == UNLIMITED:
        return None
    if not isinstance(text, str):
        raise ValueError(
            f"bandwidth must be a text such as '100mbit' or '{UNLIMITED}', not {text!r}"
        )
    return bits_per_second(text)


def _seconds(text: object, subject: str) -> float:
    match = None
    if isinstance(text, str):
        match = _TIME.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{subject} must be a time such as '20ms', '500us' or '1.5s', not {text!r}"
        )
    seconds = float(match[1]) * _TIME_UNITS[match[2]]
    if seconds > _LONGEST_TIME_S:
        raise ValueError(f"{subject} must be at most {_LONGEST_TIME_S:.0f}s, not {text!r}")
    # To a tenth of a microsecond, so that a text, its network and the text of the network are the
    # same.
    return round(seconds, 7)


def _share(text: object, subject: str) -> float:
    match = None
    if isinstance(text, str):
        match = _PERCENT.fullmatch(text)
    if match is None:
        raise ValueError(f"{subject} must be a percentage such as '0.1%', not {text!r}")
    # Rounded, because 0.7 / 100 is 0.006999999999999999.
    return round(float(match[1]) / 100, 8)


def _outage(kind: type[OutageKind], text: object) -> OutageKind:
    word = kind.word
    if not isinstance(text, str):
        raise ValueError(f"{word} must be a text such as '10s-15s', not {text!r}")
    start, dash, end = text.partition("-")
    start_s = _seconds(start.strip(), f"start of a {word}")
    if not dash:
        return kind(start_s)
    return kind(start_s, _seconds(end.strip(), f"end of a {word}"))


def _in_order(kind: type[OutageKind], texts: Iterable[object]) -> tuple[OutageKind, ...]:
    outages = [_outage(kind, text) for text in texts]
    outages.sort(key=operator.attrgetter("start_s"))
    for earlier, later in itertools.pairwise(outages):
        if earlier.end_s is None or earlier.end_s > later.start_s:
            raise ValueError(
                f"{later} must begin after the end of the {kind.word} before it, {earlier}"
            )
    return tuple(outages)


def _host_settings(
    values: Mapping[str, Any], outages: Mapping[str, Iterable[object]]
) -> HostSettings:
    """Return the settings of a host, with the texts of its outages by their words."""
    return HostSettings(
        values.get("bandwidth"),
        values.get("cpu", 1.0),
        _in_order(Cut, outages.get("cut", ())),
        _in_order(Kill, outages.get("kill", ())),
        _in_order(Pause, outages.get("pause", ())),
        values.get("join", 0.0),
    )


def _random_outages(values: Mapping[str, Any], name: str) -> RandomOutages:
    if "mtbf" not in values:
        raise ValueError(f"{name} must have a mean time between failures: write '60s-mtbf'")
    seed = values.get("seed", 1)
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= _LARGEST_SEED:
        raise ValueError(
            f"seed of {name} must be a whole number from 0 to {_LARGEST_SEED}, not {seed!r}"
        )
    repair_s = _seconds(values.get("repair", "0s"), f"repair of {name}")
    return RandomOutages(_seconds(values["mtbf"], f"mtbf of {name}"), repair_s, seed)


def _from_tables(tables: Mapping[str, Any]) -> Network:
    keys = ("racks", "hosts_per_rack", "link", "between", "hosts", "kills", "pauses")
    _check_keys(tables, keys, "the file")
    between = tables.get("between")
    numbers = {}
    for key in ("racks", "hosts_per_rack"):
        value = tables.get(key)
        if (value is None) != (between is None):
            raise ValueError(f"{key} must be given if, and only if, the table [between] is given")
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise ValueError(f"{key} must be a whole number, not {value!r}")
        numbers[key] = value
    hosts = _hosts_of(tables.get("hosts", []))
    link = _link_of(tables.get("link"), "[link]")
    racks, hosts_per_rack = numbers["racks"] or 1, numbers["hosts_per_rack"]
    if between is not None:
        between = _link_of(between, "[between]")
    random: dict[str, RandomOutages] = {}
    for name in ("kills", "pauses"):
        if name in tables:
            _check_keys(tables[name], ("mtbf", "repair", "seed"), f"[{name}]")
            random[name] = _random_outages(tables[name], f"[{name}]")
    return Network(link, between, racks, hosts_per_rack, _different(hosts), **random)


def _hosts_of(described: object) -> dict[int, HostSettings]:
    """Read the tables ``[[hosts]]``."""
    hosts: dict[int, HostSettings] = {}
    if not isinstance(described, list):
        raise ValueError("hosts must be tables [[hosts]], each with the number of its host")
    for table in described:
        keys = ("host", "bandwidth", "cpu", "cuts", "kills", "pauses", "join")
        _check_keys(table, keys, "[[hosts]]")
        number = table.get("host")
        if isinstance(number, bool) or not isinstance(number, int) or number < 0 or number in hosts:
            raise ValueError(
                f"host of [[hosts]] must be a number from 0, once each, not {number!r}"
            )
        outages: dict[str, list[object]] = {}
        for kind in _OUTAGES:
            times = table.get(f"{kind.word}s", [])
            if not isinstance(times, list):
                raise ValueError(
                    f"{kind.word}s of host {number} must be a list such as ['10s-15s'], "
                    f"not {times!r}"
                )
            outages[kind.word] = times
        settings: dict[str, Any] = {}
        if "bandwidth" in table:
            settings["bandwidth"] = _bandwidth(table["bandwidth"])
        if "cpu" in table:
            settings["cpu"] = _share(table["cpu"], "cpu")
        if "join" in table:
            settings["join"] = _seconds(table["join"], "join")
        hosts[number] = _host_settings(settings, outages)
    return hosts


def _different(hosts: Mapping[int, HostSettings]) -> dict[int, HostSettings]:
    """Leave out hosts without a difference from the others, such as one with ``100%-cpu``."""
    return {host: settings for host, settings in hosts.items() if settings != HostSettings()}


def _link_of(table: Any, name: str) -> Link:
    if table is None:
        raise ValueError(f"the table {name} must be given: it has the bandwidth of a link")
    _check_keys(table, ("bandwidth", "round_trip", "jitter", "loss"), name)
    if "bandwidth" not in table:
        raise ValueError(
            f"bandwidth of {name} must be given: write for example bandwidth = '100mbit'"
        )
    return Link(
        _bandwidth(table["bandwidth"]),
        _seconds(table.get("round_trip", "0s"), f"round_trip of {name}"),
        _seconds(table.get("jitter", "0s"), f"jitter of {name}"),
        _share(table.get("loss", "0%"), f"loss of {name}"),
    )


def _check_keys(table: Any, names: tuple[str, ...], where: str) -> None:
    if not isinstance(table, Mapping):
        raise ValueError(f"{where} must be a table, not {table!r}")
    unknown = sorted(set(table) - set(names))
    if unknown:
        raise ValueError(
            f"keys of {where} must be among {', '.join(names)}, not {', '.join(unknown)}"
        )
