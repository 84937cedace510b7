"""``mlbench network``: the networks that this machine can emulate."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import click

from mlbench_core.cli._output import json_option, print_field, print_json, print_table
from mlbench_core.network.named import NETWORKS, get_network

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from mlbench_core.network.description import Link, Network

__all__ = ["NetworkType", "network"]


class NetworkType(click.ParamType):
    """A network: a name, a TOML file or a text."""

    name = "network"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Network:
        """Return the network."""
        # click may pass a value that is already converted.
        if not isinstance(value, str):
            return value  # type: ignore[no-any-return]
        try:
            return get_network(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the names that begin with ``incomplete``."""
        from click.shell_completion import CompletionItem

        return [
            CompletionItem(name, help=known.title) for name, known in NETWORKS.items() if name.startswith(incomplete)
        ]


@click.group()
def network() -> None:
    """List and describe networks to emulate on this machine."""


@network.command("list")
@json_option
def list_(as_json: bool) -> None:
    """List the named networks."""
    if as_json:
        print_json([{"name": name, **dataclasses.asdict(known)} for name, known in NETWORKS.items()])
        return
    print_table(("NAME", "NETWORK", "TITLE"), [(name, known.text, known.title) for name, known in NETWORKS.items()])


@network.command()
@click.argument("described", metavar="NETWORK", type=NetworkType())
@json_option
def show(described: Network, as_json: bool) -> None:
    """Show a network: a name, a TOML file, or a text such as '100mbit,20ms'."""
    known = next((known for known in NETWORKS.values() if known.network == described), None)
    if as_json:
        print_json({"text": str(described), **dataclasses.asdict(described), "source": known.source if known else None})
        return
    print_field("network", described)
    if known is not None:
        print_field("title", known.title)
        print_field("source", known.source)
    if described.between is None:
        print_field("hosts", "any number at one switch")
        _print_link("links", described.link)
    else:
        print_field("hosts", f"{described.num_hosts}: {described.racks} racks of {described.hosts_per_rack}")
        _print_link("in a rack", described.link)
        _print_link("between", described.between)
    for number, settings in sorted(described.hosts.items()):
        print_field(f"host {number}", settings)


def _print_link(name: str, link: Link) -> None:
    bandwidth = "no limit" if link.bandwidth is None else f"{link.bandwidth / 1e6:g} Mbit/s in each direction"
    parts = [bandwidth, f"round trip {link.round_trip_s * 1e3:g} ms"]
    parts += [f"jitter {link.jitter_s * 1e3:g} ms"] if link.jitter_s else []
    parts += [f"loss {link.loss * 100:g} %"] if link.loss else []
    print_field(name, ", ".join(parts))
