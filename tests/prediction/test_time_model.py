"""Predictions from one measured run."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from mlbench_core.comparison.result_record import RunRecord
from mlbench_core.errors import ConfigurationError
from mlbench_core.network import get_network, parse_network
from mlbench_core.prediction import collective_s, predict, predict_repeats, predict_time_to_goal

SLOW = "10mbit,40ms"


def record(**changes: Any) -> RunRecord:
    """A run of 4 workers: 100 steps of 50 ms, 10 ms of them waiting, until the goal.

    Each worker has 32 samples in a step."""
    entry = {"op": "all_reduce", "group": 4, "calls": 200, "bytes": 200 * 4000, "overlapped": False}
    found = RunRecord(
        "measured",
        configuration={"workers": 4, "algorithm": "centralized_sgd", "network": None, "threads": 1},
        machine={"cores": 4, "hosts": 1},
        reached=True,
        time_to_goal_s=5.0,
        train_s=10.0,
        communication_exposed_s=1.0,
        steps_s={"backprop": 4.0},
        steps_to_goal=100,
        batches=200,
        samples_per_s=4 * 32 * 200 / 10.0,
        collectives=[entry],
    )
    return dataclasses.replace(found, **changes)


def configured(**changes: Any) -> dict[str, Any]:
    return {**record().configuration, **changes}


def test_a_prediction_is_compute_and_waiting() -> None:
    network = parse_network(SLOW)
    found = predict(record(), network, 8)
    # The measured run waited 10 ms in each step, of which its own machine explains a part.
    local_s = 0.01 - collective_s("all_reduce", 4000, 4, parse_network("unlimited"))
    assert found.exposed_s == pytest.approx(collective_s("all_reduce", 4000, 8, network) + local_s)
    assert found.step_s == pytest.approx(0.04 + found.exposed_s)
    assert found.steps == 50
    assert (
        found.time_to_goal_s
        == pytest.approx(50 * found.step_s)
        == predict_time_to_goal(record(), network, 8)
    )
    assert found.bytes_sent == 8 * 4000 * 50
    assert found.assumption == "samples to the goal as measured with 4 workers"


def test_the_measured_network_gives_the_measured_time() -> None:
    found = predict(record(), parse_network("unlimited"), 4)
    assert found.step_s == pytest.approx(0.05)
    assert found.time_to_goal_s == pytest.approx(5.0)
    assert found.assumption == "steps as measured with 4 workers"


def test_one_worker_only_computes() -> None:
    found = predict(record(), parse_network(SLOW), 1)
    assert (found.exposed_s, found.bytes_sent) == (0, 0)
    assert found.step_s == pytest.approx(0.04)
    assert found.steps == 400


def test_the_backward_pass_hides_overlapped_collectives() -> None:
    entry = {**record().collectives[0], "overlapped": True}  # type: ignore[index]
    run = record(collectives=[entry], communication_exposed_s=0.0)
    # 20 ms of each step are the backward pass.
    total_s = collective_s("all_reduce", 4000, 4, parse_network(SLOW))
    slow = predict(run, parse_network(SLOW), 4)
    assert slow.hidden_s == pytest.approx(0.02)
    assert slow.exposed_s == pytest.approx(total_s - 0.02)
    fast = predict(run, parse_network("unlimited"), 4)
    assert fast.exposed_s == 0
    assert fast.hidden_s == pytest.approx(
        collective_s("all_reduce", 4000, 4, parse_network("unlimited"))
    )


def test_oversubscribed_processors_are_counted_out() -> None:
    run = record(machine={"cores": 2, "hosts": 1})
    assert predict(run, parse_network(SLOW), 1).step_s == pytest.approx(0.02)
    # So is the half of the local work.
    local_s = (0.01 - collective_s("all_reduce", 4000, 4, parse_network("unlimited"))) / 2
    waiting_s = collective_s("all_reduce", 4000, 8, parse_network(SLOW)) + local_s
    assert predict(run, parse_network(SLOW), 8).exposed_s == pytest.approx(waiting_s)
    assert predict(
        record(machine={"cores": 2, "hosts": 2}), parse_network(SLOW), 1
    ).step_s == pytest.approx(0.04)
    on_gpu = record(machine={"cores": 2, "hosts": 1}, configuration=configured(device="cuda"))
    assert predict(on_gpu, parse_network(SLOW), 1).step_s == pytest.approx(0.04)


@pytest.mark.parametrize(
    ("samples", "compute_s"),
    [
        pytest.param(32, 0.03, id="as many"),
        pytest.param(35, 0.03, id="a smaller last batch"),
        # divide_batch(128, 64, workers) gives 64 to one worker and 32 to each of four.
        pytest.param(64, 0.04, id="a divided batch"),
        pytest.param(None, 0.04, id="not counted"),
    ],
)
def test_a_run_of_one_worker_with_as_many_samples_gives_the_compute_time(
    samples: int | None, compute_s: float
) -> None:
    alone = record(
        configuration=configured(workers=1), communication_exposed_s=None, time_to_goal_s=3.0,
        samples_per_s=None if samples is None else samples * 200 / 10.0,
    )  # fmt: skip
    network = parse_network(SLOW)
    assert predict(record(), network, 1, alone).step_s == pytest.approx(compute_s)
    (found,) = predict_repeats([alone, record()], network, 8)
    assert found.step_s == pytest.approx(compute_s + found.exposed_s)
    # One with as many samples counts wherever it is.
    other = dataclasses.replace(alone, samples_per_s=32 * 200 / 10.0, time_to_goal_s=3.5)
    (found,) = predict_repeats([alone, record(), other], network, 8)
    assert found.step_s == pytest.approx(min(compute_s, 0.035) + found.exposed_s)


def test_of_two_equally_near_numbers_of_workers_the_smaller_counts() -> None:
    """A median over both would be the steps of neither."""
    four = record()
    entry = {**record().collectives[0], "group": 2}  # type: ignore[index]
    two = record(
        configuration=configured(workers=2), steps_to_goal=150, time_to_goal_s=7.5,
        collectives=[entry],
    )  # fmt: skip
    for records in ([four, two], [two, four]):
        (found,) = predict_repeats(records, parse_network(SLOW), 3)
        assert found.steps == 100
        assert found.assumption == "samples to the goal as measured with 2 workers"
    assert len(predict_repeats([four, two, four], parse_network(SLOW), 4)) == 2


def test_a_straggler_slows_the_computation_down() -> None:
    network = parse_network("unlimited; host1: 50%-cpu")
    assert predict(record(), network, 4).step_s == pytest.approx(0.04 / 0.5 + 0.01)
    assert predict(record(), network, 1).step_s == pytest.approx(0.04)


def test_a_straggler_of_the_measured_run_is_not_counted_twice() -> None:
    text = "unlimited; host1: 50%-cpu"
    measured = record(configuration=configured(network=text))
    assert predict(measured, parse_network(text), 4).step_s == pytest.approx(0.05)
    assert predict(measured, parse_network("unlimited"), 4).step_s == pytest.approx(
        0.04 * 0.5 + 0.01
    )


def test_neighbors_wait_for_the_slowest_link_of_the_whole_ring() -> None:
    entry = {"op": "neighbors", "group": 3, "calls": 200, "bytes": 200 * 10**6, "overlapped": False}
    run, network = record(collectives=[entry]), parse_network("1gbit; host5: 10mbit")
    assert predict(run, network, 8).exposed_s > 0.8 > 0.1 > predict(run, network, 4).exposed_s


def test_more_workers_than_the_critical_number_save_no_steps() -> None:
    network = parse_network(SLOW)
    assert predict(record(), network, 1024, critical_workers=16).steps == 25
    assert predict(record(), network, 8, critical_workers=16).steps == 50
    # A goal needs at least one step.
    assert predict(record(), network, 1024).steps == 1
    assert predict(record(), network, 1024, critical_workers=2).steps == 100
    assert "up to 16 workers" in predict(record(), network, 1024, critical_workers=16).assumption


@pytest.mark.parametrize(
    "changes", [{"collectives": None}, {"configuration": {"workers": 1}}, {"batches": 0}]
)
def test_a_run_without_the_figures_is_refused(changes: dict[str, Any]) -> None:
    message = "run measured did not record the collectives of several workers"
    with pytest.raises(ConfigurationError, match=message):
        predict(record(**changes), parse_network(SLOW), 2)


def test_a_run_that_missed_its_goal_has_steps_but_no_time_to_it() -> None:
    run = record(reached=False, steps_to_goal=None, time_to_goal_s=None)
    found = predict(run, parse_network(SLOW), 4)
    assert found.time_to_goal_s is None
    assert found.bytes_sent is None
    with pytest.raises(ConfigurationError, match="run measured did not reach its goal"):
        predict_time_to_goal(run, parse_network(SLOW), 4)


def test_waiting_of_unknown_cause_is_named() -> None:
    network = get_network("datacenter")
    (found,) = predict(record(), network, 8).caveats
    assert "is not explained by its network" in found
    # A wait that the network explains, and one worker, which waits for nobody.
    assert predict(record(communication_exposed_s=0.02), network, 8).caveats == ()
    assert predict(record(), network, 1).caveats == ()


def waiting_for_other_load() -> RunRecord:
    """A run that waited 110 ms of each step of 160 ms, in which it worked for 1 ms."""
    return record(communication_exposed_s=11.0, communication_cpu_s=0.1, time_to_goal_s=16.0)


def test_waiting_for_other_load_is_not_added_to_other_networks() -> None:
    network = get_network("datacenter")
    found = predict(waiting_for_other_load(), network, 8)
    assert found.exposed_s == pytest.approx(collective_s("all_reduce", 4000, 8, network) + 0.001)
    assert found.step_s == pytest.approx(0.05 + found.exposed_s)
    (caveat,) = found.caveats
    there_s = collective_s("all_reduce", 4000, 4, parse_network("unlimited"))
    assert f"that waited most waited {109 - 1e3 * there_s:.1f} ms in a step" in caveat
    assert "is not added" in caveat
    assert predict(waiting_for_other_load(), network, 1).caveats == ()
    # Without the processor time, it is not known what the waiting was.
    unknown = predict(
        dataclasses.replace(waiting_for_other_load(), communication_cpu_s=None), network, 8
    )
    assert unknown.exposed_s == pytest.approx(found.exposed_s + 0.109 - there_s)
    assert "is not explained by its network" in unknown.caveats[0]


def test_work_is_at_most_the_waiting_that_the_network_does_not_explain() -> None:
    # 10 ms of waiting, in which the worker worked for 20 ms: a part of its work was at the time of
    # the messages.
    network = get_network("datacenter")
    found = predict(record(communication_cpu_s=2.0), network, 8)
    assert found.exposed_s == predict(record(), network, 8).exposed_s
    assert found.caveats == ()
    # 4 workers share 2 cores, and the time without a core does not count as processor time.
    busy = record(communication_cpu_s=0.4, machine={"cores": 2, "hosts": 1})
    assert predict(busy, network, 8).exposed_s == pytest.approx(
        collective_s("all_reduce", 4000, 8, network) + 0.004
    )


@pytest.mark.parametrize(("network", "workers", "error"), [
    ("lan-1g", 2, 0.058), ("lan-1g", 4, 0.215), ("lan-1g", 8, 0.458),
    ("datacenter", 2, 0.073), ("datacenter", 3, 0.224), ("datacenter", 4, 0.224),
     ("datacenter", 8, 0.417),
    ("home-fibre", 2, 0.024), ("mobile-lte", 4, 0.024), ("wan-transatlantic", 8, 0.024),
    # Networks that were not validated have the range of the largest error.
    ("datacenter", 9, 0.650), (SLOW, 2, 0.380), (SLOW, 4, 0.380), (SLOW, 5, 0.650),
    (SLOW, 9, 0.650),
])  # fmt: skip
def test_the_range_is_that_of_the_measured_errors(network: str, workers: int, error: float) -> None:
    found = predict(record(), get_network(network), workers)
    assert found.step_range_s is not None and found.time_to_goal_range_s is not None
    low_s, high_s = found.step_range_s
    # A prediction of one end would be the error away from it.
    assert found.step_s / low_s - 1 == pytest.approx(error)
    assert 1 - found.step_s / high_s == pytest.approx(error)
    assert found.steps is not None
    assert found.time_to_goal_range_s == pytest.approx((found.steps * low_s, found.steps * high_s))


def test_a_prediction_without_messages_or_a_goal_has_no_range_of_them() -> None:
    assert predict(record(), get_network("datacenter"), 1).step_range_s is None
    assert predict(record(), get_network("datacenter"), 1).time_to_goal_range_s is None
    missed = record(reached=False, steps_to_goal=None, time_to_goal_s=None)
    found = predict(missed, get_network("datacenter"), 4)
    assert found.step_range_s is not None
    assert found.time_to_goal_range_s is None


@pytest.mark.parametrize(("network", "workers", "reason"), [
    ("datacenter", 2, None), ("datacenter", 8, None), ("mobile-lte", 4, None),
    ("lan-1g", 8, None),
    ("datacenter", 9, "with more than 8 workers, so the range is that of its largest error"),
    (SLOW, 9, "with more than 8 workers, so the range is that of its largest error"),
    (SLOW, 4, "on such networks, so the range is that of its largest error with as many "
     "workers"),
])  # fmt: skip
def test_a_case_that_was_not_validated_is_named(
    network: str, workers: int, reason: str | None
) -> None:
    found = predict(record(communication_exposed_s=0.02), get_network(network), workers).caveats
    expected = f"the model was not validated {reason}"
    assert list(found) == ([] if reason is None else [expected])


def test_an_oversubscribed_run_gives_the_step_of_one_with_a_core_for_each_worker() -> None:
    """Processor time is the same, although the steps of one run took five times as long."""
    alone = record(compute_cpu_s=4.0, communication_cpu_s=0.1)
    shared = record(
        compute_cpu_s=4.0, communication_cpu_s=0.1, time_to_goal_s=25.0, train_s=50.0,
        communication_exposed_s=5.0, steps_s={"backprop": 20.0},
        # By its cores, each worker would have had the half of one.
        machine={"cores": 2, "hosts": 1},
    )  # fmt: skip
    network = parse_network(SLOW)
    for workers in (1, 4, 64):
        found, expected = (predict(run, network, workers) for run in (shared, alone))
        assert found.step_s == pytest.approx(expected.step_s)
    assert predict(shared, network, 1).step_s == pytest.approx(0.04)
    # The backward pass that hides messages is 20 ms of 40 ms in both.
    entry = {**record().collectives[0], "overlapped": True}  # type: ignore[index]
    for run in (shared, alone):
        hiding = dataclasses.replace(run, collectives=[entry])
        assert predict(hiding, network, 4).hidden_s == pytest.approx(0.02)


def test_processor_time_needs_no_correction_for_a_straggler() -> None:
    measured = record(configuration=configured(network="unlimited; host1: 50%-cpu"))
    found = predict(dataclasses.replace(measured, compute_cpu_s=4.0), parse_network(SLOW), 1)
    assert found.step_s == pytest.approx(0.04)


def test_a_run_of_one_worker_predicts_one_worker() -> None:
    # It compresses for 5 ms in each step of 50 ms.
    alone = record(
        configuration=configured(workers=1), collectives=None, compute_cpu_s=2.0,
        communication_cpu_s=0.5,
    )  # fmt: skip
    found = predict(alone, parse_network(SLOW), 1)
    assert found.step_s == pytest.approx(0.02 + 0.005)
    assert (found.exposed_s, found.time_to_goal_s) == pytest.approx((0.005, 2.5))


def test_only_the_collectives_until_the_goal_count() -> None:
    """After the warm-up of 1-bit Adam, messages are small. The goal was reached before its end."""
    large = {"op": "all_reduce", "group": 4, "calls": 100, "bytes": 4 * 10**7, "overlapped": False}
    small = {**large, "bytes": 100}
    found = predict(
        record(collectives=[large, small], collectives_to_goal=[large]), parse_network(SLOW), 4
    )
    assert found.bytes_sent == 4 * 4 * 10**7
    waiting_s = collective_s("all_reduce", 4 * 10**5, 4, parse_network(SLOW))
    assert found.exposed_s == pytest.approx(waiting_s, rel=0.05)
