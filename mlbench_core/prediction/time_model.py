"""Predict the time of a step and the time to the goal from one measured run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from mlbench_core.arguments import check_int
from mlbench_core.comparison.result_record import RunRecord
from mlbench_core.errors import ConfigurationError
from mlbench_core.network.description import Link, Network
from mlbench_core.network.named_networks import get_network
from mlbench_core.prediction.costs import Collective, collective_s

__all__ = [
    "NOT_ADDED",
    "ONE_MACHINE",
    "UNEXPLAINED_SHARE",
    "Prediction",
    "have_equal_steps",
    "largest_error",
    "network_of",
    "predict",
    "predict_time_to_goal",
    "samples_of_step",
    "share_of_core",
    "slowest_cpu",
    "steps_of",
]

ONE_MACHINE = Network(Link(None))
"""The network of a run without a described one: its workers talked inside of one machine."""

# Measured by benchmarks/micro/prediction.py on 2026-11-23 (the last three networks) and 2026-11-30,
# see docs/howto/prediction.md. Mean error of a step's time as a share of the measured one, by
# network and largest number of workers.
_ERRORS = {
    "lan-1g": {2: 0.058, 4: 0.215, 8: 0.458},
    "datacenter": {2: 0.073, 4: 0.224, 8: 0.417},
    "home-fibre": {8: 0.024},
    "mobile-lte": {8: 0.024},
    "wan-transatlantic": {8: 0.024},
}
# The largest error of a single step, in the same measurements.
_LARGEST_ERRORS = {
    "lan-1g": {2: 0.127, 4: 0.380, 8: 0.650},
    "datacenter": {2: 0.145, 4: 0.350, 8: 0.569},
    "home-fibre": {8: 0.104},
    "mobile-lte": {8: 0.104},
    "wan-transatlantic": {8: 0.104},
}
_LARGEST_ERROR = 0.650
# Of networks that were not validated: the largest of these errors, by largest number of workers.
_ERRORS_OF_OTHERS = {4: 0.380, 8: 0.650}
_MOST_WORKERS = 8
NOT_ADDED = "this is not added"
"""The end of the caveat on waiting that a prediction leaves out."""
# Below this share of a step, waiting without an explanation does not change what a prediction
# means.
UNEXPLAINED_SHARE = 0.1
# Steps are the same work if their samples differ by no more than this share. The last batch of an
# epoch may be smaller than others.
_MOST_UNEQUAL = 0.1


@dataclass(frozen=True)
class Prediction:
    """The predicted times of a run.

    Attributes:
        workers: Number of workers.
        network: Text of the network.
        step_s: Seconds of a training step.
        exposed_s: Seconds of it in which training waits for communication.
        hidden_s: Seconds of communication in a step during which training goes on.
        steps: Training steps until the goal; None if the measured run did not reach it.
        time_to_goal_s: Seconds of training until the goal; None likewise.
        bytes_sent: Bytes that all workers send until the goal; None likewise.
        assumption: The assumption behind ``steps``, one sentence.
        caveats: Reasons why the times are less certain, a sentence each.
        step_range_s: The least and the most seconds of a step, from the mean error that was
            measured for this network and number of workers, else from the largest error. It is not
            a confidence interval. None for one worker, whose step was not a part of that
            measurement.
        time_to_goal_range_s: The same of ``time_to_goal_s``. It has no error of ``steps``, which is
            not known.
    """

    workers: int
    network: str
    step_s: float
    exposed_s: float
    hidden_s: float
    steps: float | None
    time_to_goal_s: float | None
    bytes_sent: float | None
    assumption: str
    caveats: tuple[str, ...] = ()
    step_range_s: tuple[float, float] | None = None
    time_to_goal_range_s: tuple[float, float] | None = None


@dataclass(frozen=True)
class _Measured:
    """The figures of one step of a measured run.

    Attributes:
        workers: Number of workers.
        compute_s: Seconds without communication, as they are with a core for each worker.
        backward_s: Seconds of the backward pass, likewise.
        local_s: Seconds of work in the waiting that the network does not explain, such as
            compression. All of that waiting if the processor time was not measured.
        other_s: Seconds of waiting that are neither; None if the processor time was not measured.
        collectives: The collectives.
    """

    workers: int
    compute_s: float
    backward_s: float
    local_s: float
    other_s: float | None
    collectives: tuple[Collective, ...]


def predict(
    record: RunRecord,
    network: Network,
    workers: int,
    alone: RunRecord | None = None,
    critical_workers: int | None = None,
) -> Prediction:
    """Predict a run like a measured one on another network or with another number of workers.

    Args:
        record: The measured run of at least two workers, with the record of its collectives. A run
            of one worker predicts one worker only.
        network: The network.
        workers: Number of workers. Each has the batch size of the measured run.
        alone: A run of one worker. Its compute time counts in place of that of ``record`` if their
            steps have as many samples, see :func:`have_equal_steps`.
        critical_workers: Number of workers from which on more workers do not save steps; None if
            there is none.

    Returns:
        The prediction.

    Raises:
        ConfigurationError: The measured run lacks figures that the prediction needs.
        ValueError: A number is out of range.
    """
    check_int("workers", workers)
    if critical_workers is not None:
        check_int("critical_workers", critical_workers)
    measured = _read(record, workers, alone)
    cpu = slowest_cpu(network, workers)
    backward_s = measured.backward_s / cpu
    exposed_s, hidden_s = _communication_s(measured, network, workers, backward_s)
    step_bytes = 0.0
    error: float | None = None
    if workers > 1 or measured.workers == 1:
        exposed_s += measured.local_s
    if workers > 1:
        error = _error(_ERRORS, network, workers)
        each = [entry.scaled(measured.workers, workers) for entry in measured.collectives]
        step_bytes = sum(entry.calls * entry.size_bytes for entry in each)
    step_s = measured.compute_s / cpu + exposed_s
    steps, assumption = _steps(record, workers, critical_workers)
    step_range_s: tuple[float, float] | None = None
    if error is not None:
        # The error is a share of the measured time m: the prediction p is between m (1 - error) and
        # m (1 + error).
        step_range_s = (step_s / (1 + error), step_s / (1 - error))
    time_to_goal_s: float | None = None
    bytes_sent: float | None = None
    time_to_goal_range_s: tuple[float, float] | None = None
    if steps is not None:
        time_to_goal_s, bytes_sent = steps * step_s, steps * workers * step_bytes
        if step_range_s is not None:
            time_to_goal_range_s = (steps * step_range_s[0], steps * step_range_s[1])
    return Prediction(
        workers,
        str(network),
        step_s,
        exposed_s,
        hidden_s,
        steps,
        time_to_goal_s,
        bytes_sent,
        assumption,
        _caveats(record, measured, network, workers),
        step_range_s,
        time_to_goal_range_s,
    )


def _caveats(
    record: RunRecord, measured: _Measured, network: Network, workers: int
) -> tuple[str, ...]:
    """Return the caveats: waiting of unknown cause, and a case that was not validated."""
    if workers == 1:
        return ()
    caveats = []
    least_s = UNEXPLAINED_SHARE * ((record.total_s or 0.0) / steps_of(record))
    other_s = measured.other_s or 0.0
    if other_s > least_s:
        # The table that a run prints has the first worker, without the first step.
        caveats.append(
            f"the worker of the run {record.name} that waited most waited {1e3 * other_s:.1f} ms "
            "in a step (mean of all steps) for something that is neither its network nor work of "
            f"its own thread, such as other load on the machine: {NOT_ADDED}"
        )
    if measured.other_s is None and measured.local_s > least_s:
        caveats.append(
            f"{measured.local_s * 1e3:.1f} ms of waiting in a step of the run {record.name} is not "
            "explained by its network: it is unknown whether this is local work, which stays, or "
            "other load, which does not"
        )
    if workers > _MOST_WORKERS:
        caveats.append(
            f"the model was not validated with more than {_MOST_WORKERS} workers, so the range is "
            "that of its largest error"
        )
    elif network not in map(get_network, _ERRORS):
        caveats.append(
            "the model was not validated on such networks, so the range is that of its largest "
            "error with as many workers"
        )
    return tuple(caveats)


def largest_error(network: Network, workers: int) -> float:
    """Return the largest error of a step's time in the validation, as a share of the true time.

    Args:
        network: The network. Of one that was not validated, the largest error of all networks.
        workers: Number of workers.
    """
    return _error(_LARGEST_ERRORS, network, workers)


def _error(table: Mapping[str, Mapping[int, float]], network: Network, workers: int) -> float:
    if workers > _MOST_WORKERS:
        return _LARGEST_ERROR
    errors: Mapping[int, float] = _ERRORS_OF_OTHERS
    for name, of_network in table.items():
        # By its properties, because the user may have described a validated network by a text.
        if get_network(name) == network:
            errors = of_network
            break
    # Between two measured numbers of workers, the error of the larger one counts.
    return errors[min(count for count in errors if count >= workers)]


def predict_time_to_goal(record: RunRecord, network: Network, workers: int) -> float:
    """Predict the seconds of training until the goal; see :func:`predict`.

    Args:
        record: A measured run of at least two workers that reached its goal.
        network: The network.
        workers: Number of workers.

    Raises:
        ConfigurationError: The run did not reach its goal, or lacks other figures.
    """
    time_s = predict(record, network, workers).time_to_goal_s
    if time_s is None:
        raise ConfigurationError(
            f"run {record.name} did not reach its goal: its steps to the goal are unknown"
        )
    return time_s


def _read(record: RunRecord, predicted: int, alone: RunRecord | None) -> _Measured:
    """Return the figures of a step of a measured run, to predict a number of workers."""
    # A worker alone shares neither cores nor caches, so its computation is the better measure.
    source = record
    if alone is not None and have_equal_steps(record, alone):
        source = alone
    entries, workers, batches = record.collectives, record.workers, record.batches
    # With some methods, the collectives after the goal differ from those before it.
    if record.reached and record.steps_to_goal and record.collectives_to_goal is not None:
        entries, batches = record.collectives_to_goal, record.steps_to_goal
    if workers == predicted == 1 and batches:
        compute_s, share = _compute_s(source)
        # A worker alone may compress its gradients, too, and it waits for nobody.
        local_s = source.communication_cpu_s
        if local_s is None:
            local_s = (source.communication_exposed_s or 0.0) * share
        return _Measured(1, compute_s, 0.0, local_s / steps_of(source), 0.0, ())
    if entries is None or workers is None or workers < 2 or not batches:
        remedy = "observe the script, or average with an optimizer or a hook of this library"
        if workers is None or workers < 2:
            remedy = "measure a run of 2 workers or more, too"
        elif not batches:
            remedy = "train with a Tracker that marks the start and the end of each batch"
        raise ConfigurationError(
            f"run {record.name} did not record the collectives of several workers: {remedy}"
        )
    collectives = []
    for entry in entries:
        calls, size_bytes = entry["calls"] / batches, entry["bytes"] / entry["calls"]
        collectives.append(
            Collective(entry["op"], entry["group"], calls, size_bytes, entry["overlapped"])
        )
    compute_s, share = _compute_s(source)
    backward_s = (source.steps_s.get("backprop") or 0.0) / (source.batches or 1) * share
    measured = _Measured(workers, compute_s, backward_s, 0.0, None, tuple(collectives))
    there = network_of(record)
    exposed_s = record.communication_exposed_s
    if exposed_s is None:
        # Nothing was hidden, or the version of that run did not record it: compute has been reduced
        # by this time, too.
        exposed_s = record.phases_s.get("communication") or 0.0
    waited_s = exposed_s / steps_of(record)
    backward_there_s = backward_s / slowest_cpu(there, workers)
    explained_s, _ = _communication_s(measured, there, workers, backward_there_s)
    unexplained_s = max(0.0, waited_s - explained_s)
    if record.communication_cpu_s is None:
        local_s = unexplained_s * share_of_core(record)
        return dataclasses.replace(measured, local_s=local_s)
    # Processor time has no part in which a thread waited for a core.
    local_s = min(unexplained_s, record.communication_cpu_s / steps_of(record))
    return dataclasses.replace(measured, local_s=local_s, other_s=unexplained_s - local_s)


def network_of(record: RunRecord) -> Network:
    """Return the network of a measured run."""
    text = record.configuration.get("network")
    if not text:
        return ONE_MACHINE
    return get_network(text)


def slowest_cpu(network: Network, workers: int) -> float:
    """Return the least share of its processor time that one of the first hosts has."""
    least = 1.0
    for rank, host in network.hosts.items():
        # The workers of a run are on the first hosts.
        if rank < workers:
            least = min(least, host.cpu)
    return least


def steps_of(record: RunRecord) -> int:
    """Return the number of steps to which the times of a record belong."""
    if record.reached and record.steps_to_goal:
        return record.steps_to_goal
    return record.batches or 1


def have_equal_steps(record: RunRecord, alone: RunRecord) -> bool:
    """Return True if a step of a worker is the same work as in a run of one worker.

    It has as many samples. Some programs divide a batch among the workers.

    Args:
        record: The run.
        alone: The run of one worker.

    Returns:
        False also if the samples were not counted.
    """
    samples, samples_alone = samples_of_step(record), samples_of_step(alone)
    if samples is None or samples_alone is None:
        return False
    return abs(samples - samples_alone) <= _MOST_UNEQUAL * samples_alone


def samples_of_step(record: RunRecord) -> float | None:
    """Return the mean samples of a worker in a step; None if they were not counted."""
    if not record.batches or record.samples_per_s is None or record.train_s is None:
        return None
    return record.samples_per_s * record.train_s / (record.batches * (record.workers or 1))


def _compute_s(record: RunRecord) -> tuple[float, float]:
    """Return the seconds of a step without communication if each worker has a core of its own.

    The second number is their share of the measured seconds.
    """
    seconds = record.without_communication_s
    # One worker does not communicate.
    if seconds is None and record.workers == 1:
        seconds = record.total_s
    if seconds is None:
        raise ConfigurationError(
            f"run {record.name} did not record compute and communication times"
        )
    if record.compute_cpu_s is not None:
        # Processor time has no part in which a thread waited for a core.
        share = 1.0
        if seconds:
            share = record.compute_cpu_s / seconds
        return record.compute_cpu_s / steps_of(record), share
    # The measured time of a host that had a part of its processor time only contains that already.
    share = share_of_core(record) * slowest_cpu(network_of(record), record.workers or 1)
    return seconds / steps_of(record) * share, share


def share_of_core(record: RunRecord) -> float:
    """Return the share of a core that each thread had, below 1 with more threads than cores."""
    cores = (record.machine.get("cores") or 0) * (record.machine.get("hosts") or 1)
    threads = (record.workers or 1) * (record.configuration.get("threads") or 1)
    on_gpu = str(record.configuration.get("device") or "cpu") != "cpu"
    if not cores or on_gpu:
        return 1.0
    return min(1.0, cores / threads)


def _communication_s(
    measured: _Measured, network: Network, workers: int, backward_s: float
) -> tuple[float, float]:
    """Return the exposed and the hidden seconds of communication in a step."""
    if workers == 1:
        return 0.0, 0.0
    blocking_s = overlapped_s = 0.0
    for entry in measured.collectives:
        scaled = entry.scaled(measured.workers, workers)
        count = scaled.group
        # The peers of a worker are some of all workers, and each may have the slowest link.
        if scaled.op in ("neighbors", "pair"):
            count = workers
        seconds = scaled.calls * collective_s(scaled.op, scaled.size_bytes, count, network)
        if scaled.overlapped:
            overlapped_s += seconds
        else:
            blocking_s += seconds
    # Such a collective runs beside the backward pass, and nothing else hides it.
    hidden_s = min(overlapped_s, backward_s)
    return blocking_s + overlapped_s - hidden_s, hidden_s


def _steps(
    record: RunRecord, workers: int, critical_workers: int | None
) -> tuple[float | None, str]:
    """Return the steps to the goal with a number of workers, and the assumption behind them."""
    steps, measured = record.steps_to_goal, record.workers or 1
    if not record.reached or steps is None:
        if record.goal is None:
            return None, "the measured run had no goal"
        return None, "the measured run did not reach its goal"
    if workers == measured:
        return float(steps), f"steps as measured with {measured} workers"
    text = f"samples to the goal as measured with {measured} workers"
    if critical_workers is not None:
        text += f", up to {critical_workers} workers"
        # More workers than this do not save steps.
        measured, workers = min(measured, critical_workers), min(workers, critical_workers)
    return max(1.0, steps * measured / workers), text
