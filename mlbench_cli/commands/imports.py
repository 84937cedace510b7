"""``mlbench import``: add the runs of result folders to a master."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from mlbench_cli._client import MasterClient
from mlbench_cli._embedded import connect
from mlbench_cli._output import clean, dashboard_option, json_option, print_json, remark
from mlbench_cli.commands.results import result_folders
from mlbench_core.client.metric_delivery import MAX_BATCH
from mlbench_core.errors import MasterRequestError, MLBenchError
from mlbench_core.results.folder import read_result, verify_folder
from mlbench_core.results.upload import metrics_of, run_record

__all__ = ["import_"]

# A character may take 12 bytes in JSON, and a request has at most 16 MiB.
_MOST_CHARACTERS = 2**20


@click.command("import")
@click.argument(
    "folders",
    metavar="FOLDER...",
    nargs=-1,
    required=True,
    type=click.Path(exists=True, path_type=Path),
)
@click.option("--force", is_flag=True, help="Add runs that cannot be verified, too.")
@dashboard_option
@json_option
def import_(folders: Sequence[Path], force: bool, dashboard_url: str | None, as_json: bool) -> None:
    """Add the runs of the result folders in FOLDER... to the master.

    A FOLDER is a result folder, or has result folders at any depth. Each one is verified as by
    'mlbench results verify'. One with a problem is left out unless --force is given. A run that was
    imported before is left out, too. Exit status 1 if a run was left out.
    """
    result_paths = result_folders(folders)
    added = []
    with connect(dashboard_url) as client:
        for path in result_paths:
            try:
                run = _import(client, path, force)
            except MLBenchError as error:
                # Without an answer of the master, the next folders would fail as well.
                if isinstance(error, MasterRequestError) and error.status is None:
                    raise
                remark(f"{clean(path)}: {clean(error)}")
                continue
            added.append(run)
            if not as_json:
                details = f"(id {run['id']}, {run['metrics']} metrics)"
                click.echo(f"{clean(path)}: added as {run['run']} {details}")
    if as_json:
        print_json(added)
    left_out = len(result_paths) - len(added)
    if left_out:
        raise MLBenchError(f"{left_out} of {len(result_paths)} result folders were not imported")


def _import(client: MasterClient, folder: Path, force: bool) -> dict[str, Any]:
    problems = verify_folder(folder)
    if problems and not force:
        text = problems[0]
        if len(problems) > 1:
            text += f" (and {len(problems) - 1} more problems)"
        raise MLBenchError(f"{text}; --force adds it nevertheless")
    result = read_result(folder)
    record = run_record(folder, result)
    run = client.import_run(record)
    count = 0
    try:
        for batch in _batches(metrics_of(folder, result, run["id"], record["fingerprint"])):
            client.add_metrics(batch)
            count += len(batch)
    except MasterRequestError as error:
        # The master will never accept these metrics, and a run with a part of them would mislead.
        # Otherwise the run stays, and the same command continues.
        if error.status == 400:
            client.delete(run["id"])
        raise
    return {"folder": str(folder), "run": run["name"], "id": run["id"], "metrics": count}


def _batches(metrics: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield lists of metrics that fit into one request each."""
    batch: list[dict[str, Any]] = []
    size = 0
    for metric in metrics:
        length = len(metric["value"]) + len(metric["name"])
        if batch and (len(batch) == MAX_BATCH or size + length > _MOST_CHARACTERS):
            yield batch
            batch, size = [], 0
        batch.append(metric)
        size += length
    if batch:
        yield batch
