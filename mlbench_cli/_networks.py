"""Options and arguments that name networks, and numbers of workers on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import click

from mlbench_core.network.named_networks import NETWORKS, get_network

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from mlbench_core.network.description import Network

__all__ = ["NetworkType", "TypedNetwork", "networks_option", "workers_option"]


class TypedNetwork(NamedTuple):
    """A network, and the text that the user typed for it."""

    text: str
    network: Network


class NetworkType(click.ParamType):
    """A network: a name, a TOML file or a text."""

    name = "network"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Network:
        """Return the network."""
        # click may pass a value that is already converted.
        if not isinstance(value, str):
            return value  # type: ignore[no-any-return]
        try:
            return get_network(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the names that begin with ``incomplete``."""
        from click.shell_completion import CompletionItem

        return [
            CompletionItem(name, help=network.title)
            for name, network in NETWORKS.items()
            if name.startswith(incomplete)
        ]


class _TypedNetworkType(NetworkType):
    """As :class:`NetworkType`; the value is a :class:`TypedNetwork`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, TypedNetwork):
            return value
        return TypedNetwork(value.strip(), super().convert(value, param, ctx))


networks_option = click.option(
    "--network",
    "networks",
    multiple=True,
    required=True,
    type=_TypedNetworkType(),
    help="Network; repeatable.",
)
workers_option = click.option(
    "--workers",
    multiple=True,
    required=True,
    type=click.IntRange(1, 1024),
    help="Number of workers; repeatable.",
)
