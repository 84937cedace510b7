"""Short runs of a script, from which a recommendation is made."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from mlbench_cli._networks import TypedNetwork
from mlbench_cli._output import clean, remark
from mlbench_cli._script import Script
from mlbench_core.errors import ConfigurationError, MLBenchError
from mlbench_core.observe.methods.names import parse_method
from mlbench_core.observe.methods.own_class import check_own_class
from mlbench_core.observe.output import parse_goal, parse_metric

__all__ = ["METHODS", "WORKERS", "probe"]

METHODS = ("as-is", "bf16", "power_sgd:rank=4", "diloco:period=20")
"""The methods that are tried if none are given."""
WORKERS = (1, 2)
"""The numbers of workers of the runs."""
# The other half is for the start and the end of the runs.
_SHARE_OF_TRAINING = 0.5
_LEAST_S = 5.0


def probe(
    command: click.Command,
    script: Sequence[str],
    networks: Sequence[TypedNetwork],
    methods: Sequence[str],
    metrics: Sequence[str],
    goal: str | None,
    budget_s: float,
    output: Path | None,
) -> Path:
    """Run a script for a short time with each method, with one worker and with two.

    Args:
        command: The command, whose options come before the script.
        script: The script and its arguments, or ``-m`` with a module and its arguments.
        networks: The networks of the runs with two workers.
        methods: Texts of ``--method``.
        metrics: Texts of ``--metric``.
        goal: Text of ``--goal``.
        budget_s: Seconds for all runs; no run starts after them.
        output: Folder for the runs. One that has runs of the same call already is completed.

    Returns:
        The folder.

    Raises:
        click.UsageError: An argument is wrong; nothing was started.
        ConfigurationError: The folder has runs of another call.
        MLBenchError: No run has ended.
    """
    # Imported here, because a folder of runs needs none of it.
    from mlbench_core.experiments import compare

    if len(script) == 1 and script[0] == "-m":
        raise click.UsageError("-m needs the name of a module")
    try:
        Script(script).check(Path.cwd())
        for method in methods:
            check_own_class(parse_method(method), Path.cwd())
        parsed = list(map(parse_metric, metrics))
        if goal is not None:
            parse_goal(goal, parsed)
    except ConfigurationError as error:
        raise click.UsageError(str(error)) from None
    Script(script).show_own_options(Path.cwd(), command)
    if output is None:
        name = Path(script[0] if script[0] != "-m" else script[1]).stem
        output = Path("mlbench-results", f"recommend-{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    runs = len(methods) * (1 + len(networks))
    limit_s = max(_LEAST_S, _SHARE_OF_TRAINING * budget_s / runs)
    settings: dict[str, Any] = {"limit": f"{limit_s:.1f}s", "budget": f"{budget_s:.1f}s"}
    settings["goal"] = goal
    if metrics:
        pairs = (text.partition("=") for text in metrics)
        settings["metrics"] = {name: regex for name, _, regex in pairs}
    try:
        compare(
            methods,
            script=shlex.join(script),
            workers=WORKERS,
            networks=[typed.text for typed in networks],
            output=output,
            **settings,
        )
    except ConfigurationError:
        raise
    except MLBenchError as error:
        # Methods that do not fit the script fail, and the others are compared.
        if not any(output.glob("runs/*/result.json")):
            raise
        remark(clean(str(error)))
    remark(
        f"the runs are in {output}: give this folder in place of the script to read them again, "
        "or as --output to complete them"
    )
    return output
