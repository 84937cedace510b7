"""The list of the runs."""

from __future__ import annotations

import itertools
import math
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any
from urllib.parse import urlencode

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from mlbench_core.calling_environment import split_observed
from mlbench_core.comparison.goal_times import is_miss, known_times_s, median_s
from mlbench_core.comparison.result_record import RunRecord
from mlbench_core.run_terms import GoalAim
from mlbench_master.api.routes import StorePart
from mlbench_master.database.columns import number_of
from mlbench_master.database.store import RUN_SORTS, Run, Store, run_owner
from mlbench_master.dates import now_us
from mlbench_master.runs.run_goals import PLAN_METRIC, RunGoal, RunPlan, split_command
from mlbench_master.web.compared_results import FINAL_STATES
from mlbench_master.web.render import duration, page
from mlbench_master.web.runs_by_field import (
    MOST_READ,
    MOST_TEXT,
    Fields,
    RunQuery,
    condition,
    fields_of,
    goal_of,
)

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
# The search offers these, and an option of thousands of runs may have a value of its own in each.
_MOST_CONDITIONS = 300
_FIELD = re.compile(r"[A-Za-z_][\w.-]{0,63}")
# A page with this number would begin after the largest id.
_MOST_PAGES = 2**31

router = APIRouter()


@dataclass(frozen=True)
class View:
    """The part of the list that an address asks for.

    Attributes:
        q: The text of a search, see :class:`~mlbench_master.web.runs_by_field.RunQuery`.
        state: Their state; empty for all.
        group: The field by which the runs are grouped; empty for a list of runs.
        sort: One of :data:`~mlbench_master.database.store.RUN_SORTS`, with a ``-`` before it for
            the largest value first.
        page: The number of the page, from 1.
    """

    q: str = ""
    state: str = ""
    group: str = ""
    sort: str = "-created_at"
    page: int = 1

    @classmethod
    def read(cls, request: Request) -> View:
        """Return the view of a request, in which unknown values count as left out."""
        query = request.query_params
        # PostgreSQL refuses NUL in a parameter.
        view = cls(q=query.get("q", "").replace("\x00", "")[:MOST_TEXT])
        if query.get("state") in STATES:
            view = replace(view, state=query["state"])
        if _FIELD.fullmatch(query.get("group", "")):
            view = replace(view, group=query["group"])
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
        fields: Its configuration, see :func:`~mlbench_master.web.runs_by_field.fields_of`.
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


@dataclass(frozen=True)
class RunGroup:
    """Runs with one value of a field, which the list shows as one row.

    Attributes:
        value: The value, empty for the runs without one.
        q: The text of a search that finds them.
        found: The runs and their fields, in the order of the list.
    """

    value: str
    q: str
    found: list[tuple[Run, Fields]]

    @property
    def runs(self) -> list[Run]:
        """Return the runs."""
        return [run for run, _ in self.found]

    @property
    def states(self) -> Counter[str]:
        """Return the number of runs in each state."""
        return Counter(run.shown_state for run in self.runs)

    @property
    def to_goal(self) -> str:
        """Return the best and the median time to the goal; see :func:`is_miss` for misses."""
        records = []
        goals = set()
        for run, fields in self.found:
            goal = run.goal_record
            # With a goal after a time, all times are equal.
            if run.state not in FINAL_STATES or (goal is not None and goal.budget_s is not None):
                continue
            record = RunRecord(str(run.name), state=run.shown_state)
            if goal is not None:
                goals.add(tuple(str(fields.get(name)) for name in ("task", "dataset", "goal")))
                record = replace(record, reached=goal.reached, time_to_goal_s=goal.time_to_goal_s)
            records.append(record)
        if not goals:
            return ""
        if len(goals) > 1:
            return "different goals"
        reached = [record for record in records if record.reached]
        text = f"{len(reached)} of {len(reached) + sum(map(is_miss, records))} reached it"
        times = known_times_s(reached)
        if not times:
            return text
        median = median_s(records)
        median_text = "not reached"
        if median is not None:
            median_text = duration(median)
        return f"best {duration(min(times))}, median {median_text}; {text}"


def group_runs(found: Iterable[tuple[Run, Fields]], field: str, q: str) -> list[RunGroup]:
    """Return runs by the values of a field, in the order of the first run of each.

    A run with several values, such as tags, is in several groups. Those without one come last.

    Args:
        found: The runs and their fields.
        field: The field.
        q: The text of the search that has found the runs.
    """
    groups: dict[str, RunGroup] = {}
    for run, fields in found:
        for value in fields.get(field, [""]):
            if value not in groups:
                words = " ".join(filter(None, [q, condition(field, value)]))
                groups[value] = RunGroup(value, words, [])
            groups[value].found.append((run, fields))
    without = groups.pop("", None)
    in_order = list(groups.values())
    if without is not None:
        in_order.append(without)
    return in_order


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
        # Of a script that is measured unchanged, only the script: the method has its own column.
        observed = split_observed(split_command(str(run.command)))
        if observed is None:
            return str(run.command), ""
        return shlex.join(observed[1]), ""
    details = [*fields.get("dataset", ()), *fields.get("preset", ())]
    return f"Task {fields['task'][0]}", ", ".join(details)


@router.get("/runs/")
def runs_page(request: Request, store: StorePart) -> HTMLResponse:
    view = View.read(request)
    states = []
    if view.state == "failed":
        # For the store, a run that a user stopped has failed, too.
        states.append("failed itself")
    elif view.state:
        states.append(view.state)
    query = RunQuery.parse(view.q)
    count = store.count_runs(*states, text=query.text)
    left_out = 0
    found: list[tuple[Run, Fields]] = []
    groups: list[RunGroup] = []
    if query.conditions or view.group:
        found = query.find(store, *states, sort=view.sort)
        left_out = max(count - MOST_READ, 0)
        if view.group:
            groups = group_runs(found, view.group, view.q)
        count = len(groups or found)
    # A run that was deleted may have been the only one of the last page.
    last = max(math.ceil(count / _PAGE), 1)
    view = replace(view, page=min(view.page, last))
    first = (view.page - 1) * _PAGE
    runs: Sequence[Run] = ()
    if query.conditions and not view.group:
        runs = [run for run, _ in found[first : first + _PAGE]]
    elif not view.group:
        runs = store.runs(*states, text=query.text, sort=view.sort, offset=first, limit=_PAGE)
    listed = list_runs(store, runs)
    conditions = _conditions([*found, *((item.run, item.fields) for item in listed)])
    columns = {name: title for name, title in _FIELD_COLUMNS.items() if name in conditions}
    # Tags come first: they are what most groups are made of.
    fields = dict.fromkeys(["tag", *sorted(conditions), view.group])
    return page(
        request,
        "runs.html",
        view=view,
        states=STATES,
        columns=_COLUMNS,
        field_columns=columns,
        fields=list(filter(None, fields)),
        conditions=list(itertools.chain.from_iterable(conditions.values()))[:_MOST_CONDITIONS],
        runs=listed,
        groups=groups[first : first + _PAGE],
        count=count,
        first=first + 1,
        last_page=last,
        left_out=left_out,
    )


def _conditions(found: Iterable[tuple[Run, Fields]]) -> dict[str, list[str]]:
    """Return the conditions for the values of each field of some runs."""
    conditions: dict[str, set[str]] = {}
    for _, fields in found:
        for name, values in fields.items():
            conditions.setdefault(name, set()).update(condition(name, value) for value in values)
    return {name: sorted(conditions[name]) for name in sorted(conditions)}
