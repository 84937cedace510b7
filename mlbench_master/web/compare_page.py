"""The page that compares chosen runs: table and figures of ``mlbench compare``, live curves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, HTTPException, Query, Request, Response
from fastapi.responses import HTMLResponse

from mlbench_core.comparison.group_repeats import Group, plural
from mlbench_core.comparison.prices import Pricing, load_prices
from mlbench_core.comparison.table import Column, cell
from mlbench_master.api.routes import StorePart, run_or_404
from mlbench_master.database.store import Run, Store
from mlbench_master.web.compared_results import Compared, compare
from mlbench_master.web.figures import TITLES, Figures, can_draw, draw, figures_key
from mlbench_master.web.render import page
from mlbench_master.web.runs_by_field import MOST_TEXT, RunQuery

__all__ = ["MOST_RUNS", "router"]

MOST_RUNS = 100
"""Maximum number of runs in a comparison."""

# The latest runs that the form offers.
_MOST_OFFERED = 200
_TYPES = {
    "csv": "text/csv; charset=utf-8",
    "md": "text/markdown; charset=utf-8",
    "json": "application/json",
}
_FIGURE_TYPES = {"svg": "image/svg+xml", "png": "image/png", "csv": _TYPES["csv"]}
# The styles of a figure are in attributes. It has no scripts, and could not run them.
_FIGURE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; sandbox"

router = APIRouter()


@dataclass(frozen=True)
class Choice:
    """The parameters of an address.

    Attributes:
        runs: The chosen runs, each once.
        picked: The ids of those that the address names.
        q: The text of a search, which has found the others.
        left_out: The number of further runs that it has found.
        unknown: The ids without a run, for example because it was deleted.
        baseline: Label of the baseline, or an empty text.
        pricing: The price of the chosen machine.
    """

    runs: tuple[Run, ...]
    picked: tuple[int, ...]
    q: str
    left_out: int
    unknown: tuple[str, ...]
    baseline: str
    pricing: Pricing

    def address(
        self, path: str = "/compare/", only: Sequence[int] | None = None, **more: str
    ) -> str:
        """Return the address of a page or a file for these runs.

        Args:
            path: The path.
            only: The ids of the runs; by default the chosen runs, whatever the search finds then.
            **more: Further parameters.
        """
        q = ""
        if only is None:
            q, only = self.q, self.picked
        machine = ""
        if self.pricing.machine:
            machine = self.pricing.machine.name
        values = {"q": q, "run": only, "baseline": self.baseline, "machine": machine, **more}
        parameters = {name: value for name, value in values.items() if value}
        return f"{path}?{urlencode(parameters, doseq=True)}"

    def without(self, run_id: int) -> str:
        """Return the address of the page without one of the runs."""
        return self.address(only=[run.id for run in self.runs if run.id != run_id])

    def compare(self, store: Store) -> Compared:
        """Return the comparison of the runs."""
        return compare(store, self.runs, self.pricing, self.baseline or None)


def _choice(
    store: StorePart,
    run: Annotated[Sequence[str], Query()] = (),
    q: str = "",
    baseline: str = "",
    machine: str = "",
) -> Choice:
    # A run that an address names twice would count as two repetitions.
    wanted = list(dict.fromkeys(run))
    if len(wanted) > MOST_RUNS:
        message = f"run: at most {MOST_RUNS} runs are compared, not {len(wanted)}: choose fewer"
        raise HTTPException(400, message)
    runs: list[Run] = []
    unknown: list[str] = []
    for run_id in wanted:
        try:
            runs.append(run_or_404(store, run_id))
        # A run may have been deleted since the address was kept; the page compares the others.
        except HTTPException:
            # An address may hold a text of any length.
            unknown.append(run_id[:80])
    picked = tuple(found.id for found in runs)
    q = q.replace("\x00", "")[:MOST_TEXT]
    if q:
        runs += [found for found, _ in RunQuery.parse(q).find(store) if found.id not in picked]
    left_out = max(len(runs) - MOST_RUNS, 0)
    machines = load_prices()
    if machine and machine not in machines:
        message = f"machine: must be one of {', '.join(machines)}, not {machine[:80]!r}"
        raise HTTPException(400, message)
    pricing = Pricing(machines.get(machine))
    chosen = tuple(runs[:MOST_RUNS])
    return Choice(chosen, picked, q, left_out, tuple(unknown), baseline, pricing)


ChoicePart = Annotated[Choice, Depends(_choice)]


@router.get("/compare")
@router.get("/compare/")
def compare_page(request: Request, store: StorePart, choice: ChoicePart) -> HTMLResponse:
    comparison = choice.compare(store)
    groups = comparison.groups
    tables = []
    key = ""
    if groups:
        for columns, rows in comparison.table.tables():
            tables.append((_title(columns), columns, rows))
        key = figures_key(groups, choice.pricing.per_hour)
    chosen = {run.id for run in choice.runs}
    offered = [run for run in store.runs(sort="-id", limit=_MOST_OFFERED) if run.id not in chosen]
    return page(
        request,
        "compare.html",
        choice=choice,
        found=comparison,
        rows=_rows_of(groups),
        tables=tables,
        cell=cell,
        labels=list(dict.fromkeys(group.label for group in groups)),
        machines=list(load_prices().values()),
        offered=offered,
        most=MOST_RUNS,
        figures_key=key,
        metric=_metric(choice.runs),
    )


@router.get("/compare/table.{suffix}")
def compare_table(suffix: str, store: StorePart, choice: ChoicePart) -> Response:
    table = _existing(choice, store).table
    if suffix == "csv":
        text = table.as_csv()
    elif suffix == "md":
        text = table.as_markdown()
    elif suffix == "json":
        text = json.dumps(table.as_json(), indent=2, ensure_ascii=False) + "\n"
    else:
        raise HTTPException(404, f"table: must be one of {', '.join(_TYPES)}, not {suffix[:80]!r}")
    headers = {"Content-Disposition": f'attachment; filename="table.{suffix}"'}
    # A name may hold half of a surrogate pair, which UTF-8 cannot encode.
    content = text.encode("utf-8", "replace")
    return Response(content, media_type=_TYPES[suffix], headers=headers)


@router.get("/compare/figures")
@router.get("/compare/figures/")
def compare_figures(request: Request, store: StorePart, choice: ChoicePart) -> HTMLResponse:
    comparison = choice.compare(store)
    groups = comparison.groups
    figures = Figures()
    if groups and can_draw():
        figures = draw(groups, choice.pricing.per_hour)
    problem = comparison.problem
    if not problem and not groups:
        problem = "No chosen run has a result yet."
    return page(
        request,
        "figures.html",
        choice=choice,
        figures=figures,
        can_draw=can_draw(),
        problem=problem,
        titles=TITLES,
        figures_key=figures_key(groups, choice.pricing.per_hour),
    )


@router.get("/compare/figures/{name}")
def compare_figure(name: str, store: StorePart, choice: ChoicePart) -> Response:
    comparison = _existing(choice, store)
    if not can_draw():
        message = "figures need matplotlib: install it with pip install 'mlbench-core[charts]'"
        raise HTTPException(404, message)
    figures = draw(comparison.groups, choice.pricing.per_hour)
    content = figures.files.get(name)
    suffix = name.rpartition(".")[2]
    if content is None or suffix not in _FIGURE_TYPES:
        names = ", ".join(sorted(figures.files))
        raise HTTPException(404, f"figure: must be one of {names}, not {name[:80]!r}")
    headers = {"Content-Security-Policy": _FIGURE_POLICY}
    return Response(content, media_type=_FIGURE_TYPES[suffix], headers=headers)


def _existing(choice: Choice, store: Store) -> Compared:
    """Return the comparison, or raise an HTTPException if there is none."""
    if choice.unknown:
        raise HTTPException(404, f"run: there is no run {choice.unknown[0]!r}")
    comparison = choice.compare(store)
    if comparison.problem:
        raise HTTPException(400, f"run: {comparison.problem}")
    if not comparison.groups:
        message = "run: none of these runs has a result: wait until one ends, or choose others"
        raise HTTPException(404, message)
    return comparison


def _rows_of(groups: Sequence[Group]) -> dict[str, str]:
    """Return the row of the table in which each run is, by the name of the run."""
    rows = {}
    for group in groups:
        for record in group.records:
            rows[record.name] = f"{group.label}, {plural(group.workers, 'worker')}"
    return rows


def _title(columns: Sequence[Column]) -> str:
    other = {"a": "Tests", "algorithm": "Performance profile"}
    titles = {"time": "Time to the goal", "scaling": "Scaling and communication"}
    return other.get(columns[0].key) or titles[columns[-1].table]


def _metric(runs: Sequence[Run]) -> str:
    """Return the metric of the first goal that is known, or an empty text."""
    for run in runs:
        goal = run.goal_record
        if goal is not None and goal.metric:
            return f"{goal.metric} @ 0"
    return ""
