"""The engines that start runs, as values of options."""

from __future__ import annotations

from typing import Any

import click
from click.shell_completion import CompletionItem

from mlbench_master.engines import engine_names

__all__ = ["EngineType"]


class EngineType(click.ParamType):
    """The name of an engine."""

    name = "engine"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        # The engines of other packages are looked for only when a value is given.
        names = engine_names()
        if value not in names:
            self.fail(f"{value!r} must be one of {', '.join(names)}", param, ctx)
        return str(value)

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return "NAME"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [CompletionItem(name) for name in engine_names() if name.startswith(incomplete)]
