"""``mlbench network``: the networks that this machine can emulate."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import click

from mlbench_cli._networks import NetworkType
from mlbench_cli._output import json_option, print_field, print_json, print_table, remark
from mlbench_core.network.named_networks import NETWORKS

if TYPE_CHECKING:
    from mlbench_core.network.description import Link, Network
    from mlbench_core.network.measure import PathReport
    from mlbench_core.network.named_networks import NamedNetwork

__all__ = ["network"]


@click.group()
def network() -> None:
    """Describe, test and remove networks that are emulated on this machine."""


@network.command("list")
@json_option
def list_(as_json: bool) -> None:
    """List the named networks."""
    records = []
    rows = []
    for name, each in NETWORKS.items():
        records.append({"name": name, **dataclasses.asdict(each)})
        rows.append((name, each.text, each.title))
    if as_json:
        print_json(records)
        return
    print_table(("NAME", "NETWORK", "TITLE"), rows)


@network.command()
@click.argument("described", metavar="NETWORK", type=NetworkType())
@json_option
def show(described: Network, as_json: bool) -> None:
    """Show a network: a name, a TOML file, or a text such as '100mbit,20ms'."""
    # A text may describe a network that has a name, and then title and source are known, too.
    named: NamedNetwork | None = None
    for each in NETWORKS.values():
        if each.network == described:
            named = each
            break
    if as_json:
        source: str | None = None
        if named is not None:
            source = named.source
        fields = dataclasses.asdict(described)
        print_json({"text": str(described), **fields, "source": source})
        return
    print_field("network", described)
    if named is not None:
        print_field("title", named.title)
        print_field("source", named.source)
    if described.between is None:
        print_field("hosts", "any number at one switch")
        _print_link("links", described.link)
    else:
        racks = f"{described.racks} racks of {described.hosts_per_rack}"
        print_field("hosts", f"{described.num_hosts}: {racks}")
        _print_link("in a rack", described.link)
        _print_link("between", described.between)
    for number, settings in sorted(described.hosts.items()):
        print_field(f"host {number}", settings)
    if described.kills is not None:
        print_field("kills", described.kills)
    if described.pauses is not None:
        print_field("pauses", described.pauses)


def _print_link(name: str, link: Link) -> None:
    parts = ["no limit"]
    if link.bandwidth is not None:
        parts = [f"{link.bandwidth / 1e6:g} Mbit/s in each direction"]
    parts.append(f"round trip {link.round_trip_s * 1e3:g} ms")
    if link.jitter_s:
        parts.append(f"jitter {link.jitter_s * 1e3:g} ms")
    if link.loss:
        parts.append(f"loss {link.loss * 100:g} %")
    print_field(name, ", ".join(parts))


@network.command()
@click.argument("described", metavar="NETWORK", type=NetworkType())
@click.option(
    "--hosts",
    type=click.IntRange(min=2),
    metavar="N",
    help="Number of hosts (default: the smallest one).",
)
@json_option
def test(described: Network, hosts: int | None, as_json: bool) -> None:
    """Emulate a network, measure it, and compare the figures with its description."""
    from mlbench_core.network.measure import measure_network

    try:
        report = measure_network(described, hosts)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--hosts") from None
    if as_json:
        print_json(dataclasses.asdict(report))
        return
    rows: list[tuple[str, ...]] = []
    for path in report.paths:
        rows += _path_rows(path)
    for each in report.all_reduce:
        time = f"{each.seconds * 1e3:,.2f} ms"
        rows.append(("all", f"all-reduce of {each.num_bytes:,} B", "", time, ""))
    if report.all_reduce:
        bandwidth = f"{report.all_reduce[-1].bus_bandwidth / 1e6:,.1f} Mbit/s"
        rows.append(("", "its bus bandwidth", "", bandwidth, ""))
    print_table(("HOSTS", "PROPERTY", "ASKED", "MEASURED", "DIFFERENCE"), rows, right=(2, 3, 4))
    machine = report.machine
    remark(
        f"{report.network} with {report.hosts} hosts on {machine['cores']} cores, "
        f"load {machine['load']} at the start, "
        f"TCP congestion control {machine['congestion_control']}"
    )


@network.command(
    help="Remove emulated networks whose processes have ended, "
    "and the processes that still run in them."
)
@json_option
def clean(as_json: bool) -> None:
    """Remove emulated networks whose processes have ended."""
    from mlbench_core.network.emulated import EmulatedNetwork

    removed = EmulatedNetwork.cleanup()
    if as_json:
        print_json(removed)
        return
    for name in removed:
        click.echo(name)
    remark(f"removed {len(removed)} namespaces")


def _path_rows(path: PathReport) -> list[tuple[str, ...]]:
    asked, hosts = path.asked, f"{path.source}-{path.target}"
    rows: list[tuple[str, ...]] = [
        (hosts, "bandwidth", *_compare(asked.bandwidth, path.bandwidth, 1e6, "Mbit/s")),
        ("", "round trip", *_compare(asked.round_trip_s, path.round_trip_s, 1e-3, "ms")),
    ]
    if asked.jitter_s:
        low, high = asked.round_trip_s - asked.jitter_s, asked.round_trip_s + asked.jitter_s
        rows.append(("", "its range", _range_ms(low, high), _range_ms(*path.round_trips_s), ""))
    if path.loss is not None:
        rows.append(("", "loss", f"{asked.loss:.2%}", f"{path.loss:.2%}", ""))
    return rows


def _range_ms(low_s: float, high_s: float) -> str:
    return f"{low_s * 1e3:.1f} to {high_s * 1e3:.1f} ms"


def _compare(asked: float | None, measured: float, unit: float, name: str) -> tuple[str, str, str]:
    if asked is None:
        return "no limit", f"{measured / unit:,.1f} {name}", ""
    # There is no ratio to 0.
    if not asked:
        return f"0 {name}", f"{measured / unit:,.2f} {name}", f"{measured / unit:+,.2f} {name}"
    difference = f"{measured / asked - 1:+.1%}"
    return f"{asked / unit:,.1f} {name}", f"{measured / unit:,.1f} {name}", difference
