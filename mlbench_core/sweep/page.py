"""Write the page of a sweep.

It has tables, figures, the map of the methods with the least time, and conclusions in words.
"""

from __future__ import annotations

import itertools
import json
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlbench_core.comparison.figures.captions import not_among
from mlbench_core.comparison.group_repeats import plural
from mlbench_core.comparison.prices import Pricing
from mlbench_core.comparison.results_page import machine_text, software_text
from mlbench_core.comparison.table import escape, markdown_lines
from mlbench_core.errors import ConfigurationError, MissingDependencyError
from mlbench_core.files import replacing
from mlbench_core.prediction import predict_time_to_goal
from mlbench_core.sweep.fastest_methods import Map, Predict, predict_map, some_workers
from mlbench_core.sweep.grouped_runs import Outcome, duration, gather, sent_per_worker
from mlbench_core.sweep.html_page import Section, html_page, inline_svg
from mlbench_core.sweep.modelled import ModelledRecord, step_numbers
from mlbench_core.sweep.result_table import (
    TUNING_COLUMNS,
    UTILIZATION_COLUMNS,
    as_csv,
    known_columns,
    table_rows,
    tuning_rows,
    utilization_rows,
)
from mlbench_core.sweep.sentences import per_network, summary, tuning_rule
from mlbench_core.sweep.sweep_folder import COPY, RECORD, RUNS, TUNING, SweepFolder
from mlbench_core.sweep.toml_file import Sweep, load_sweep
from mlbench_core.sweep.tuning_search import Search
from mlbench_core.sweep.utilization import Utilization, predict_utilization

if TYPE_CHECKING:
    from mlbench_core.comparison.figures import Drawing
    from mlbench_core.sweep.figures.line_charts import Curve

__all__ = ["read_outcome", "write_page"]


def write_page(
    folder: Path,
    pricing: Pricing | None = None,
    title: str | None = None,
    *,
    sweep: Sweep | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> list[Path]:
    """Write the page of a sweep into its folder: ``index.html``, ``index.md``, tables and figures.

    A sweep that has not ended has a page of the runs so far. Without matplotlib, the page has no
    figures.

    Args:
        folder: The folder of the sweep, with ``sweep.toml`` and the result folders in ``runs``.
        pricing: Price of the machines; by default, that of the file's table ``price``.
        title: Title of the page; by default, that of the file.
        sweep: The sweep; by default, that of ``sweep.toml``.
        report: Called with one sentence for each figure that is not drawn, with the reason.

    Returns:
        The files written.

    Raises:
        ConfigurationError: The sweep cannot be read, no run has ended, or runs had different goals.
    """
    sweep = sweep or load_sweep(folder / COPY)
    if pricing is None:
        pricing = sweep.price
    outcome = read_outcome(folder, sweep, title)
    if not outcome.has_results:
        raise ConfigurationError(f"{folder} has no runs that have ended: run the sweep first")
    maps = _maps(outcome, predict_time_to_goal, report)
    shares = list(filter(None, map(partial(predict_utilization, outcome), _shown(outcome))))
    sections, captions, written = _figures(outcome, maps, shares, pricing, folder, report)
    rows = table_rows(outcome, pricing)
    words = {"": summary(outcome, maps)}
    for name in outcome.networks:
        words[name] = per_network(outcome, name)
    # The planned runs do not have those that repeat_stopped = false leaves out.
    facts = _facts(outcome, pricing, folder, len(sweep.points()) - outcome.planned)
    tuning: tuple[str, list[dict[str, Any]]] | None = None
    if sweep.tuning is not None:
        searches = SweepFolder(folder).searches(sweep)
        tuning = tuning_rule(sweep.tuning), tuning_rows(searches)
        facts["Tuning"] = _trials_text(searches, folder)
    columns = known_columns(rows)
    copy = folder / COPY
    # A text file of the user may begin with a byte order mark.
    source = ""
    if copy.exists():
        source = copy.read_text(encoding="utf-8-sig")
    content = {
        "title": outcome.title,
        "facts": facts,
        "words": words,
        "rows": rows,
        "maps": list(map(_map_json, maps)),
        "utilization": utilization_rows(shares),
        "records": list(_records_json(outcome)),
        "tuning": tuning and dict(zip(("rule", "rows"), tuning, strict=True)),
    }
    table = (columns, rows)
    below: dict[str, list[str]] = {}
    for section in sections:
        if section.table is not None:
            below[section.name] = markdown_lines(*section.table)
    texts = {
        "index.html": html_page(outcome.title, facts, words, sections, table, source, tuning),
        "index.md": _markdown(outcome.title, facts, words, captions, below, rows, tuning),
        "table.csv": as_csv(rows),
        "results.json": _json(content),
    }
    if tuning is not None:
        texts["tuning.json"] = _json(content["tuning"])
    for name, text in texts.items():
        with replacing(folder / name) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return [*map(folder.joinpath, texts), *written]


def read_outcome(folder: Path, sweep: Sweep, title: str | None = None) -> Outcome:
    """Read the runs of a sweep that have ended.

    Args:
        folder: The folder of the sweep.
        sweep: The sweep.
        title: Title; by default, that of the sweep.

    Raises:
        ConfigurationError: A result folder is damaged, or runs had different goals or that of a
            fixed training time.
    """
    points, records, failed = SweepFolder(folder).results(sweep)
    for record in records.values():
        # The row of a modelled run says why it has no seconds.
        if record.has_fixed_time and not sweep.is_modelled:
            raise ConfigurationError(
                f"the run {record.name} must have a value as its goal, not '{record.goal_text}': "
                f"all such times are equal, so use mlbench compare {folder / RUNS} for the values"
            )
    return gather(
        points,
        records,
        sweep.networks,
        failed=failed,
        title=title or sweep.title,
        limit_s=sweep.limit_s,
        is_modelled=sweep.is_modelled,
        is_tuned=sweep.tuning is not None,
    )


def _shown(outcome: Outcome) -> Sequence[int]:
    """Return the numbers of workers with a map and a panel of compute utilization."""
    # One worker has no network.
    return some_workers(outcome.several)


def _maps(outcome: Outcome, predict: Predict, report: Callable[[str], None]) -> list[Map]:
    maps = []
    for workers in _shown(outcome):
        prediction = predict_map(outcome, workers, predict)
        if prediction is None:
            report(f"the map for {workers} workers is not drawn: {_no_map(outcome, workers)}")
        else:
            maps.append(prediction)
    return maps


def _no_map(outcome: Outcome, workers: int) -> str:
    """Return why no algorithm has a prediction."""
    cells = []
    missed = []
    for cell in outcome.cells:
        if cell.workers == workers and cell.runs:
            cells.append(cell)
            if cell.median_s is None:
                missed.append(cell)
    # A method with a median has no prediction for another reason.
    if not missed or len(missed) < len(cells):
        return "no algorithm has a prediction"
    if all(cell.unmeasured and cell.unmeasured == cell.missed for cell in missed):
        return "the goal was not measured"
    return "no algorithm reached the goal in more than half of its runs"


def _figures(
    outcome: Outcome,
    maps: Sequence[Map],
    shares: Sequence[Utilization],
    pricing: Pricing,
    folder: Path,
    report: Callable[[str], None],
) -> tuple[list[Section], dict[str, str], list[Path]]:
    """Draw all figures: inline for the page, and those of all networks as files."""
    from mlbench_core.comparison.figures import save, style

    sections: list[Section] = []
    captions: dict[str, str] = {}
    written: list[Path] = []
    try:
        with style():
            for section, makers in _makers(outcome, maps, shares, pricing):
                whole, *single = makers
                # The tables do not depend on a figure.
                try:
                    drawing = whole()
                except Exception as error:
                    report(f"{section.name} is not drawn: {error}")
                    continue
                written += save(drawing, folder)
                captions[drawing.name] = drawing.caption
                # With networks of their own, the page shows a figure for each, and the whole one
                # is a file only.
                inline = []
                if not single:
                    inline.append(drawing)
                for make in single:
                    try:
                        inline.append(make())
                    except Exception as error:
                        report(f"{section.name} is not drawn for every network: {error}")
                for shown in inline:
                    section.figures.append(inline_svg(shown, f"{section.title}: {shown.name}"))
                    section.notes.append(drawing.caption)
                # The maps of all numbers of workers share one section.
                if not sections or sections[-1].name != section.name:
                    sections.append(section)
    except MissingDependencyError as error:
        report(f"the page has no figures: {error}")
        return [], {}, []
    return sections, captions, written


def _makers(
    outcome: Outcome, maps: Sequence[Map], shares: Sequence[Utilization], pricing: Pricing
) -> Iterator[tuple[Section, list[Callable[[], Drawing]]]]:
    """Yield each section with the functions that draw its figures.

    The first figure is that of all networks, and the others are those of the single networks.
    """
    from mlbench_core.sweep.figures.line_charts import (
        curves,
        draw_bytes,
        draw_curve,
        draw_utilization,
    )
    from mlbench_core.sweep.figures.map import draw_map
    from mlbench_core.sweep.figures.panels import draw_rows, quantities

    time, *others = quantities(outcome, pricing)
    networks: tuple[str | None, ...] = (None, *outcome.networks)

    def makers(draw: Callable[..., Drawing], *arguments: Any) -> list[Callable[[], Drawing]]:
        return [partial(draw, outcome, *arguments, name) for name in networks]

    several: list[Curve] = []
    # A line over a single number of workers would be a point.
    if len(outcome.workers) > 1:
        several += curves(outcome, pricing)
    for curve in several[:1]:
        yield Section(curve.name, curve.title), makers(draw_curve, curve)
    yield Section(time.name, time.title), makers(draw_rows, time)
    # A map has all networks in one figure.
    map_section = Section("map", "Map: the method with the least time")
    for prediction in maps:
        yield map_section, [partial(draw_map, outcome, prediction)]
    if shares:
        table = (UTILIZATION_COLUMNS, utilization_rows(shares))
        section = Section("compute_utilization", "Compute utilization", table=table)
        single = [partial(draw_utilization, outcome, [one]) for one in shares]
        yield section, [partial(draw_utilization, outcome, shares), *single]
    for curve in several[1:]:
        drawn = makers(draw_curve, curve)
        # The number of steps does not depend on the network.
        if not curve.has_networks:
            drawn = drawn[:1]
        yield Section(curve.name, curve.title), drawn
    bytes_section = Section("bytes_to_goal", "Bytes and time to goal")
    yield bytes_section, makers(draw_bytes)
    for quantity in others:
        yield Section(quantity.name, quantity.title), makers(draw_rows, quantity)


def _facts(outcome: Outcome, pricing: Pricing, folder: Path, left_out: int) -> dict[str, str]:
    groups = outcome.groups
    goals: list[str] = []
    dates: list[str] = []
    # A modelled run is in the groups of all networks.
    names = set()
    records_of_groups = map(operator.attrgetter("records"), groups)
    for record in itertools.chain.from_iterable(records_of_groups):
        names.add(record.name)
        if record.goal:
            goals.append(record.goal_text)
        if record.started_at:
            dates.append(str(record.started_at)[:10])
    ends: list[str] = []
    if dates:
        # Dates in ISO 8601 are in the order of their texts.
        ends = [min(dates), max(dates)]
    networks = [f"{name} ({network})" for name, network in outcome.networks.items()]
    time_text = ""
    total_s = sum(_seconds(folder / RUNS / name) for name in names)
    if total_s:
        time_text = _long_time(total_s)
    facts = {
        "Runs": _runs_text(outcome, left_out),
        "Goal": "; ".join(dict.fromkeys(goals))
        or "none: the times are those of the whole training",
        "Networks": "; ".join(networks),
        "Machine": "; ".join(dict.fromkeys(filter(None, map(machine_text, groups)))),
        "Software": "; ".join(dict.fromkeys(filter(None, map(software_text, groups)))),
        "Date": " to ".join(dict.fromkeys(ends)),
        "Time of all runs": time_text,
        "Price": " ".join(pricing.remarks).removeprefix("Price: "),
    }
    return {name: value for name, value in facts.items() if value}


def _runs_text(outcome: Outcome, left_out: int) -> str:
    missed: set[str] = set()
    unmeasured: set[str] = set()
    for cell in outcome.cells:
        for record in not_among(cell.group.records, cell.reached):
            # By name, because a modelled run is in the cells of all networks.
            if record.lacks_goal_metric:
                unmeasured.add(record.name)
            else:
                missed.add(record.name)
    text = (
        f"{outcome.ended} of {outcome.planned} planned; "
        f"{plural(len(missed), 'run')} missed the goal"
    )
    if outcome.limit_s is not None:
        text += f", limit {duration(outcome.limit_s)}"
    if unmeasured:
        text += f"; in {plural(len(unmeasured), 'run')}, the goal was not measured"
    text += _stopped(outcome)
    if left_out:
        text += (
            f"; {plural(left_out, 'run')} left out, because that with the first seed was stopped"
        )
    return text


def _stopped(outcome: Outcome) -> str:
    """Return the training times up to which all runs are judged."""
    if not outcome.judged_s:
        return ""
    limits = []
    for (name, workers), seconds in sorted(outcome.judged_s.items(), key=str):
        limits.append(f"{seconds:.3g} s ({name or 'one machine'}, {plural(workers, 'worker')})")
    return (
        "; all runs of a network and a number of workers are judged up to the least training time "
        "at which one of them was stopped, and a run that reached the goal later counts as "
        f"missed: {', '.join(limits)}"
    )


def _seconds(folder: Path) -> float:
    """Return the seconds from the start of a run's workers to their end; 0 if unknown."""
    try:
        return float(json.loads((folder / RECORD).read_text(encoding="utf-8"))["seconds"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0


def _records_json(outcome: Outcome) -> Iterator[dict[str, Any]]:
    """Yield the numbers of each run in each place, with the mean seconds of a step."""
    for cell in outcome.cells:
        for record, unjudged in zip(cell.group.records, cell.unjudged, strict=True):
            step_range_s: tuple[float, float] | None = None
            if isinstance(record, ModelledRecord):
                step_range_s = record.step_range_s
            yield {
                "run": record.name,
                "network": cell.network,
                "algorithm": cell.algorithm,
                "workers": cell.workers,
                "seed": record.seed,
                "modelled": outcome.modelled is not None,
                "reached": record.reached,
                "steps_to_goal": record.steps_to_goal,
                "time_to_goal_s": record.time_to_goal_s,
                **step_numbers(unjudged),
                "step_range_s": step_range_s,
                "bytes_on_wire": record.bytes_on_wire,
                "bytes_to_goal_of_worker": sent_per_worker(record),
            }


def _trials_text(searches: Iterable[Search], folder: Path) -> str:
    trials = 0
    total_s = 0.0
    for search in searches:
        for point, score in zip(search.points, search.scores, strict=True):
            if score is not None:
                trials += 1
            total_s += _seconds(folder / TUNING / point.name)
    return f"{plural(trials, 'trial')}, {_long_time(total_s)}"


def _long_time(seconds: float) -> str:
    """Return a time in the unit in which a tenth is precise enough."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 1800:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"


def _json(content: Any) -> str:
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def _map_json(prediction: Map) -> dict[str, Any]:
    return {
        "workers": prediction.workers,
        "predicted": list(map(vars, prediction.cells)),
        "measured": list(map(vars, prediction.points)),
        "left_out": prediction.left_out,
    }


def _markdown(
    title: str,
    facts: Mapping[str, str],
    words: Mapping[str, Sequence[str]],
    captions: Mapping[str, str],
    below: Mapping[str, Sequence[str]],
    rows: Sequence[dict[str, Any]],
    tuning: tuple[str, Sequence[dict[str, Any]]] | None,
) -> str:
    lines = [f"# {escape(title)}", ""]
    for name, value in facts.items():
        lines.append(f"- {name}: {escape(value)}")
    # A relative path in the file belongs to the folder from which the sweep was started.
    lines += ["", "Command, in the original folder of the file:", ""]
    lines += ["```bash", "mlbench sweep sweep.toml --output FOLDER", "```", ""]
    lines += ["## Which method when", "", *_list(words[""])]
    for name, sentences in words.items():
        if name and sentences:
            lines += ["", f"### {escape(name)}", "", *_list(sentences)]
    if tuning is not None:
        rule, trials = tuning
        lines += ["", "## Tuning", "", escape(rule), "", *markdown_lines(TUNING_COLUMNS, trials)]
        lines += [
            "",
            "[tuning.json](tuning.json) has every trial, and the folder `tuning` its run.",
        ]
    if captions:
        lines += ["", "## Figures", ""]
    for name, caption in captions.items():
        lines += [f"![{name.replace('_', ' ')}]({name}.png)", ""]
        lines += [f"{escape(caption)} ([SVG]({name}.svg))", ""]
        if name in below:
            lines += [*below[name], ""]
    lines += ["", "## Table", "", *markdown_lines(known_columns(rows), rows)]
    lines += [
        "",
        "[table.csv](table.csv) and [results.json](results.json) "
        "have the same numbers, [sweep.toml](sweep.toml)",
        "is the file of the sweep, and the folder `runs` has the result folder of each run.",
    ]
    return "\n".join(lines) + "\n"


def _list(sentences: Iterable[str]) -> list[str]:
    return [f"- {escape(sentence)}" for sentence in sentences]
