"""Model the seconds that runs need on networks, from runs of workers that share one machine.

The steps that a method needs to its goal do not depend on the network, so one run serves all
networks. The seconds of a step are predicted by :func:`mlbench_core.prediction.predict`: the
processor time of a worker, and the time of its messages. So the workers may share cores. They share
caches as well, which makes them slower, so the processor time is that of a run of one worker.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from mlbench_core.comparison.result_record import CurvePoint, RunRecord
from mlbench_core.errors import ConfigurationError
from mlbench_core.network.description import Link, Network
from mlbench_core.prediction import predict
from mlbench_core.prediction.time_model import NOT_ADDED, have_equal_steps

__all__ = [
    "ModelledRecord",
    "Place",
    "Places",
    "SweepPlace",
    "at_full_speed",
    "measured_run",
    "model_run",
    "on_networks",
    "shared_caveats",
    "step_numbers",
]


class SweepPlace(Protocol):
    """The place of a run in a sweep."""

    @property
    def name(self) -> str:
        """Name of its result folder."""

    @property
    def algorithm(self) -> str:
        """Name of its algorithm or variant."""

    @property
    def network(self) -> str | None:
        """Name of its network; None for one worker, which has no network."""

    @property
    def workers(self) -> int:
        """Number of its workers."""


@dataclass(frozen=True)
class Place:
    """The :class:`SweepPlace` of a modelled run; its name is that of the run and the network."""

    name: str
    algorithm: str
    network: str | None
    workers: int


@dataclass(frozen=True)
class ModelledRecord(RunRecord):
    """A run as it would be on a network: its steps, values and bytes, with modelled seconds.

    Times that are not modelled, such as that of validation, are unknown.

    Attributes:
        run: The measured run.
        step_range_s: The least and the most seconds of a step, from the mean error of the model;
            None for one worker.
        caveats: Reasons why the seconds are less certain, a sentence each.
    """

    run: RunRecord = field(default_factory=lambda: RunRecord(""))
    step_range_s: tuple[float, float] | None = None
    caveats: tuple[str, ...] = ()

    def curve(self, name: str) -> list[CurvePoint]:
        """Return the values of a metric with their modelled times, see :meth:`RunRecord.curve`."""
        step_s = step_numbers(self)["step_s"] or 0.0
        points = []
        for point in super().curve(name):
            time_s = point.step * step_s
            points.append(dataclasses.replace(point, time_s=time_s, train_s=time_s))
        return points


@dataclass(frozen=True)
class Places:
    """The places of modelled runs.

    Attributes:
        places: A place for each run and network.
        records: The modelled runs, by the name of their place.
        failed: Names of the places of runs that ended with an error.
        reasons: The reason for each place whose run ended, but cannot be modelled.
    """

    places: list[Place]
    records: dict[str, RunRecord]
    failed: set[str]
    reasons: dict[str, str]


def on_networks(
    places: Iterable[SweepPlace],
    records: Mapping[str, RunRecord],
    networks: Mapping[str, Network],
    failed: Collection[str],
    *,
    needs_cpu_time: bool = True,
) -> Places:
    """Model each run on each network. One worker has no network.

    Args:
        places: The planned runs.
        records: The results of those that ended, by name.
        networks: The networks by name.
        failed: Names of the runs that ended with an error.
        needs_cpu_time: See :func:`model_run`.
    """
    found = Places([], {}, set(), {})
    places = list(places)
    alone: dict[str, list[RunRecord]] = {}
    for place in places:
        if place.workers == 1 and place.name in records:
            alone.setdefault(place.algorithm, []).append(records[place.name])
    for place in places:
        names: list[str | None] = [None]
        if place.workers > 1:
            names = list(networks)
        for network in names:
            name = f"{place.name} on {network}"
            found.places.append(Place(name, place.algorithm, network, place.workers))
            if place.name in failed:
                found.failed.add(name)
            if place.name not in records:
                continue
            record = at_full_speed(records[place.name], alone.get(place.algorithm, ()))
            described: Network | None = None
            if network is not None:
                described = networks[network]
            # Other runs of the page can be modelled although this one lacks a number.
            try:
                found.records[name] = model_run(record, described, needs_cpu_time=needs_cpu_time)
            except (ConfigurationError, ValueError) as error:
                found.reasons[name] = str(error)
    return found


def at_full_speed(record: RunRecord, alone: Iterable[RunRecord]) -> RunRecord:
    """Return a run with the processor time of a worker that has a machine for itself.

    Workers that share a machine share caches and the speed of its memory, so each needs more
    processor time for a step. Local work, such as compression, is scaled by the same factor.

    Args:
        record: The run.
        alone: Runs of one worker of the same method, whose median counts. Those whose steps have
            another number of samples are left out.

    Returns:
        The run; the same object if there is nothing to compare it with.
    """
    own_s = _compute_cpu_s(record)
    # A run of one worker is the one to which others are scaled.
    if record.workers == 1 or not own_s:
        return record
    found = []
    for other in alone:
        other_s = _compute_cpu_s(other)
        if other_s is not None and have_equal_steps(record, other):
            found.append(other_s)
    if not found:
        return record
    factor = statistics.median(found) / own_s
    changes: dict[str, Any] = {}
    for name in ("compute_cpu_s", "communication_cpu_s"):
        seconds = getattr(record, name)
        changes[name] = None
        if seconds is not None:
            changes[name] = factor * seconds
    return dataclasses.replace(record, **changes)


def _compute_cpu_s(record: RunRecord) -> float | None:
    """Return the processor time of computing in a step; None if it was not measured."""
    steps = _steps_of_times(record)
    if not steps or record.compute_cpu_s is None:
        return None
    return record.compute_cpu_s / steps


def _steps_of_times(record: RunRecord) -> int | None:
    """Return the steps of a record's times: until the goal if it was reached, else all."""
    if record.reached:
        return record.steps_to_goal
    return record.batches


def model_run(
    record: RunRecord, network: Network | None, *, needs_cpu_time: bool = True
) -> ModelledRecord:
    """Return a run with the seconds that it would need on a network.

    Args:
        record: The measured run. Its workers may have shared cores.
        network: The network; None for one worker.
        needs_cpu_time: False to accept a run without processor time. Its measured seconds then
            count, as in :func:`~mlbench_core.prediction.predict`.

    Raises:
        ConfigurationError: The run lacks a number that the model needs.
    """
    _check(record, needs_cpu_time)
    prediction = predict(record, network or Network(Link(None)), record.workers or 1)
    steps, batches = _steps_of_times(record) or 0, record.batches or 0
    configuration = dict(record.configuration)
    if network is not None:
        configuration["network"] = str(network)
    time_to_goal_s: float | None = None
    if record.reached:
        time_to_goal_s = steps * prediction.step_s
    # A shallow copy, unlike dataclasses.asdict.
    fields: dict[str, Any] = {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}
    fields.update(
        configuration=configuration,
        time_to_goal_s=time_to_goal_s,
        # A run may have gone on after its goal, so this has other steps.
        train_s=batches * prediction.step_s,
        communication_exposed_s=steps * prediction.exposed_s,
        communication_hidden_s=steps * prediction.hidden_s,
        # The measured values are those of workers that shared a machine.
        validation_s=None,
        wall_s=None,
        samples_per_s=None,
        tokens_per_s=None,
        phases_s={},
        steps_s={},
    )
    return ModelledRecord(
        **fields,
        run=record,
        step_range_s=prediction.step_range_s,
        caveats=tuple(shared_caveats(prediction.caveats)),
    )


def shared_caveats(caveats: Iterable[str]) -> list[str]:
    """Return the caveats of a prediction in words that all runs share."""
    texts = []
    for text in caveats:
        if "not explained by its network" in text:
            # The text of the prediction has the name and the seconds of a single run.
            texts.append(
                "the processor time was not measured, so all waiting that the measured network "
                "does not explain counts as local work"
            )
        # The waiting for a core, of which the prediction warns, is the reason to model the time.
        elif NOT_ADDED not in text:
            texts.append(text)
    return texts


def measured_run(record: RunRecord) -> RunRecord:
    """Return the measured run behind a modelled one, or the record itself.

    The numbers of a modelled run are those of one network, so predictions start from this run.

    Args:
        record: A measured or a modelled run.
    """
    if isinstance(record, ModelledRecord):
        return record.run
    return record


def _check(record: RunRecord, needs_cpu_time: bool) -> None:
    """Raise a ConfigurationError if a run lacks a number that the model needs."""
    reason = no_cpu_time = ""
    ops = {entry["op"] for entry in record.collectives or ()}
    exposed_s = record.communication_exposed_s
    # One worker has nobody to wait for, but it may compress.
    has_waited = bool(exposed_s) or (exposed_s is None and record.workers != 1)
    if record.has_fixed_time:
        reason = "its goal is the value after a fixed training time, which depends on the machine"
    elif record.reached and not record.steps_to_goal:
        reason = "it did not record the number of its steps to the goal"
    elif "shared_memory_sum" in ops:
        reason = "its workers share memory, which hosts do not: remove --shared-memory"
    if record.compute_cpu_s is None:
        no_cpu_time = (
            "the processor time of its computation was not measured, which needs CPUs, one thread "
            "in each worker, and this version"
        )
    elif has_waited and record.communication_cpu_s is None:
        no_cpu_time = "the processor time of its communication was not measured"
    if needs_cpu_time:
        reason = reason or no_cpu_time
    if reason:
        raise ConfigurationError(reason)


def step_numbers(record: RunRecord) -> dict[str, float | None]:
    """Return the mean seconds of a step, measured or modelled.

    The steps are those until the goal if it was reached, else all. Unknown numbers are None.

    Returns:
        ``step_s``, ``compute_s`` (without exposed communication), ``exposed_s``, ``hidden_s`` and
        ``compute_share``, the compute utilization ``compute_s / step_s``.
    """
    steps = _steps_of_times(record)
    compute_s = record.without_communication_s
    # One worker does not communicate.
    if compute_s is None and record.workers == 1:
        compute_s = record.total_s
    numbers: dict[str, float | None] = {
        "step_s": record.total_s,
        "compute_s": compute_s,
        "exposed_s": record.communication_exposed_s,
        "hidden_s": record.communication_hidden_s,
    }
    for name, seconds in numbers.items():
        numbers[name] = None
        if steps and seconds is not None:
            numbers[name] = seconds / steps
    share: float | None = None
    if compute_s is not None and record.total_s:
        share = compute_s / record.total_s
    return {**numbers, "compute_share": share}
