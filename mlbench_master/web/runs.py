"""The list of the runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any
from urllib.parse import urlencode

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from mlbench_core.run_terms import GoalAim
from mlbench_master.api.routes import StorePart
from mlbench_master.database.columns import number_of
from mlbench_master.database.store import RUN_SORTS, Run, Store, run_owner
from mlbench_master.dates import now_us
from mlbench_master.runs.goals import PLAN_METRIC, RunGoal, RunPlan
from mlbench_master.web.fields import MOST_READ, Fields, RunQuery, condition, fields_of, goal_of
from mlbench_master.web.render import page

__all__ = ["ListedRun", "list_runs", "router"]

STATES = ("initialized", "started", "finished", "failed", "stopped")
_COLUMNS = {
    "name": "Name",
    "state": "State",
    "image": "Task",
    "num_workers": "Workers",
    "backend": "Backend",
    "created_at": "Created",
    "duration": "Duration",
    "goal": "Goal",
}
# The database cannot sort by these; one without a value in the list is not shown.
_FIELD_COLUMNS = {"method": "Method", "network": "Network", "tag": "Tags"}
# The first click on a column sorts texts from A and numbers from the largest or latest.
_TEXTS = ("name", "state", "image", "backend")
_PAGE = 50
# A condition for a value of 100 characters fits.
_MOST_TEXT = 500
# A page with this number would begin after the largest id.
_MOST_PAGES = 2**31

router = APIRouter()


@dataclass(frozen=True)
class View:
    """The part of the list that an address asks for.

    Attributes:
        q: The text of a search, see :class:`~mlbench_master.web.fields.RunQuery`.
        state: Their state; empty for all.
        sort: One of :data:`~mlbench_master.database.store.RUN_SORTS`, with a ``-`` before it for
            the largest value first.
        page: The number of the page, from 1.
    """

    q: str = ""
    state: str = ""
    sort: str = "-created_at"
    page: int = 1

    @classmethod
    def read(cls, request: Request) -> View:
        """Return the view of a request, in which unknown values count as left out."""
        query = request.query_params
        # PostgreSQL refuses NUL in a parameter.
        view = cls(q=query.get("q", "").replace("\x00", "")[:_MOST_TEXT])
        if query.get("state") in STATES:
            view = replace(view, state=query["state"])
        if query.get("sort", "").removeprefix("-") in RUN_SORTS:
            view = replace(view, sort=query["sort"])
        number = query.get("page", "")
        # int of thousands of digits is slow.
        if number.isascii() and number.isdecimal() and len(number) < 11:
            view = replace(view, page=min(max(int(number), 1), _MOST_PAGES))
        return view

    def address(self, **changes: Any) -> str:
        """Return the address of this view with some changes."""
        values = asdict(replace(self, **changes))
        defaults = asdict(View())
        parameters = {key: value for key, value in values.items() if value != defaults[key]}
        if not parameters:
            return "/runs/"
        return f"/runs/?{urlencode(parameters)}"

    def sorted_by(self, column: str) -> str:
        """Return the address after a click on the head of a column."""
        first, second = f"-{column}", column
        if column in _TEXTS:
            first, second = second, first
        if self.sort == first:
            first = second
        return self.address(sort=first, page=1)

    def direction(self, column: str) -> str:
        """Return the value of ``aria-sort`` of a column, empty if the list is not sorted by it."""
        return {column: "ascending", f"-{column}": "descending"}.get(self.sort, "")


@dataclass(frozen=True)
class ListedRun:
    """A run as a list shows it.

    Attributes:
        run: The run.
        program: Its task, or its command.
        details: Data set and preset of the task.
        fields: Its configuration, see :func:`~mlbench_master.web.fields.fields_of`.
        duration_s: Seconds since its start, until its end if it has ended; None before its start.
        goal: Its goal, if it has one.
        value: Latest value of the goal's metric, as text; None if it is not known.
    """

    run: Run
    program: str
    details: str
    fields: Fields
    duration_s: float | None
    goal: RunGoal | None
    value: str | None

    @property
    def share(self) -> float | None:
        """Return how close the value is to the goal, from 0 to 1; None if this is not known."""
        value = number_of(self.value)
        if self.goal is None or not self.goal.threshold or value is None:
            return None
        return round(GoalAim.of(self.goal).fraction(value), 4)


def list_runs(store: Store, runs: Sequence[Run]) -> list[ListedRun]:
    """Return runs with their goals and durations, with at most two statements for all of them."""
    now = now_us()
    goals = {run.id: goal_of(run) for run in runs}
    _add_plans(store, goals)
    wanted = []
    for run_id, goal in goals.items():
        if goal is not None and goal.metric and not goal.reached:
            wanted.append((run_owner(run_id), f"{goal.metric} @ 0"))
    values = {}
    for (owner, _), point in store.latest_entries(wanted).items():
        values[owner] = point.value
    listed = []
    for run in runs:
        fields = fields_of(run)
        program, details = _program(run, fields)
        value = values.get(run_owner(run.id))
        duration_s = run.lasted_s(now)
        listed.append(ListedRun(run, program, details, fields, duration_s, goals[run.id], value))
    return listed


def _add_plans(store: Store, goals: dict[int, RunGoal | None]) -> None:
    """Add the goals of users' programs, which their workers send after the first epoch."""
    run_ids = {run_owner(run_id): run_id for run_id, goal in goals.items() if goal is None}
    plans = store.latest_entries(itertools.product(run_ids, [PLAN_METRIC]))
    for (owner, _), point in plans.items():
        plan = RunPlan.read(point.value)
        if plan.metric:
            fields = plan.model_dump(exclude={"max_epochs"})
            goals[run_ids[owner]] = RunGoal(**fields, reached=False)


def _program(run: Run, fields: Fields) -> tuple[str, str]:
    if "task" not in fields:
        return str(run.command), ""
    details = [*fields.get("dataset", ()), *fields.get("preset", ())]
    return f"Task {fields['task'][0]}", ", ".join(details)


@router.get("/runs/")
def runs_page(request: Request, store: StorePart) -> HTMLResponse:
    view = View.read(request)
    states = [view.state] if view.state else []
    if view.state == "failed":
        # For the store, a run that a user stopped has failed, too.
        states = ["failed itself"]
    query = RunQuery.parse(view.q)
    count = store.count_runs(*states, text=query.text)
    left_out = 0
    if query.conditions:
        runs = query.find(store, *states, sort=view.sort)
        left_out = max(count - MOST_READ, 0)
        count = len(runs)
    # A run that was deleted may have been the only one of the last page.
    last = max(math.ceil(count / _PAGE), 1)
    view = replace(view, page=min(view.page, last))
    first = (view.page - 1) * _PAGE
    if query.conditions:
        runs = runs[first : first + _PAGE]
    else:
        runs = store.runs(*states, text=query.text, sort=view.sort, offset=first, limit=_PAGE)
    listed = list_runs(store, runs)
    # Each field of the listed runs, and the conditions for its values.
    fields: dict[str, set[str]] = {}
    for item in listed:
        for name, values in item.fields.items():
            fields.setdefault(name, set()).update(condition(name, value) for value in values)
    return page(
        request,
        "runs.html",
        view=view,
        states=STATES,
        columns=_COLUMNS,
        field_columns={name: _FIELD_COLUMNS[name] for name in _FIELD_COLUMNS if name in fields},
        fields=dict(sorted(fields.items())),
        runs=listed,
        count=count,
        first=first + 1,
        last_page=last,
        left_out=left_out,
    )
