"""The check of the model against the measured runs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from mlbench_core.comparison.result_record import RunRecord
from mlbench_core.network import get_network
from mlbench_core.prediction import (
    Check,
    check_repeats,
    collective_s,
    predict,
    why_unchecked,
    widened,
)

MESSAGE_S = collective_s("all_reduce", 4000, 2, get_network("datacenter"))


def run(**changes: Any) -> RunRecord:
    """A run of 2 workers in datacenter without other load: 100 steps, each with 40 ms of
    computation of 8 samples and one message, in whose time 1 ms is work."""
    entry = {"op": "all_reduce", "group": 2, "calls": 100, "bytes": 400_000, "overlapped": False}
    found = RunRecord(
        "two",
        configuration={"workers": 2, "network": "1gbit,0.5ms", "threads": 1},
        machine={"cores": 2, "hosts": 1},
        train_s=100 * (0.041 + MESSAGE_S),
        communication_exposed_s=100 * (0.001 + MESSAGE_S),
        communication_cpu_s=0.1,
        compute_cpu_s=4.0,
        batches=100,
        collectives=[entry],
    )
    return with_samples(dataclasses.replace(found, **changes), 8)


def with_samples(record: RunRecord, samples: int) -> RunRecord:
    """Return a run with this number of samples of a worker in a step."""
    count = samples * (record.batches or 0) * (record.workers or 1)
    return dataclasses.replace(record, samples_per_s=count / (record.train_s or 1.0))


def alone(cpu_s: float) -> RunRecord:
    configuration = {**run().configuration, "workers": 1}
    return run(name="one", configuration=configuration, collectives=None, compute_cpu_s=cpu_s)


def only_check(*records: RunRecord, workers: int = 8) -> Check:
    (found,) = check_repeats(records, workers)
    return found


def test_a_run_without_other_load_passes() -> None:
    found = only_check(run())
    assert (found.network, found.workers) == (get_network("datacenter"), 2)
    assert found.measured_s == pytest.approx(0.041 + MESSAGE_S)
    assert found.model_s == pytest.approx(found.measured_s)
    # The largest error in datacenter with 2 workers, not that with the 8 to predict.
    expected = (found.model_s / 1.145, found.model_s / 0.855)
    assert found.model_range_s == pytest.approx(expected)
    assert found.holds and found.problem == ""
    assert predict(run(), get_network("datacenter"), 2).step_s == found.model_s


def test_a_run_on_a_busy_machine_fails() -> None:
    """The numbers are of a real run, on 2 cores that other programs used, too."""
    entry = {"op": "all_reduce", "group": 2, "calls": 150, "bytes": 83218800, "overlapped": True}
    two = run(
        configuration={**run().configuration, "network": "1gbit"},
        train_s=7.259421206996194, communication_exposed_s=2.768891308,
        communication_cpu_s=0.0, compute_cpu_s=1.8912305270000038,
        phases_s={"data": 0.1926973790032207}, steps_s={"backprop": 3.0436743760118428},
        batches=150, collectives=[entry],
    )  # fmt: skip
    one = dataclasses.replace(
        alone(3.531524019), train_s=7.268879480998294, communication_exposed_s=0.0, batches=300,
        steps_s={"backprop": 3.4010708390018607},
    )  # fmt: skip
    found = only_check(with_samples(one, 8), two, workers=4)
    assert found.measured_s == pytest.approx(0.0483961, rel=1e-5)
    # The messages, of 4.4 ms at 1 Gbit/s, are hidden behind the backward pass.
    assert found.model_s == pytest.approx(3.531524019 / 300)
    assert not found.holds
    assert found.problem == (
        "a step took 48.40 ms of wall time and 12.61 ms of processor time, so probably other "
        "programs used the machine. Measure again on a quiet machine."
    )


@pytest.mark.parametrize(("changes", "reason"), [
    # 40 ms of each step without work, outside of messages.
    ({"train_s": 100 * (0.081 + MESSAGE_S)}, "probably other programs used the machine. Measure"),
    ({"train_s": 100 * (0.081 + MESSAGE_S), "phases_s": {"data": 3.0}},
     "and 30.00 ms were for its data: loading was slow, or"),
    ({"train_s": 100 * 0.09, "communication_exposed_s": 100 * 0.05},
     "training waited 50.00 ms in a step, and by the model 2."),
])  # fmt: skip
def test_the_reason_of_a_long_step_is_named(changes: dict[str, Any], reason: str) -> None:
    found = only_check(run(**changes))
    assert found.measured_s > found.model_range_s[1] and not found.holds
    assert reason in found.problem


def test_workers_on_all_cores_are_named_as_another_reason() -> None:
    """On a quiet machine, too, the threads that send have no core of their own."""
    long = run(train_s=100 * 0.09, communication_exposed_s=100 * 0.05)
    text = "the reason may be that 2 workers on 2 cores left none for the threads that send"
    assert text in only_check(long).problem
    free = dataclasses.replace(long, machine={"cores": 4, "hosts": 1})
    assert only_check(free).problem.endswith("Measure again on a quiet machine.")


def test_a_host_with_a_half_of_a_processor_is_not_other_load() -> None:
    """Its step takes 80 ms of wall time for 40 ms of work, and the model knows that."""
    configuration = {**run().configuration, "network": "1gbit,0.5ms; host1: 50%-cpu"}
    slow = run(configuration=configuration, train_s=100 * (0.081 + MESSAGE_S))
    assert only_check(slow).holds
    # Waiting of 80 ms more fails the check, but not because of the wall time of the computation.
    waiting = dataclasses.replace(
        slow, train_s=100 * (0.161 + MESSAGE_S), communication_exposed_s=100 * (0.081 + MESSAGE_S)
    )
    assert "messages took longer, or a worker waited" in only_check(waiting).problem


def test_a_worker_alone_may_need_less_processor_time() -> None:
    found = only_check(alone(2.0), run())
    assert found.measured_s > found.model_range_s[1]
    text = "40.00 ms of processor time, and in the run one, which the model uses, 20.00 ms"
    assert text in found.problem


def test_a_worker_alone_with_another_batch_is_not_used() -> None:
    found = only_check(with_samples(alone(8.0), 16), run())
    assert found.holds and found.model_s == pytest.approx(found.measured_s)
    assert "which the model uses" not in found.problem


def test_a_step_can_be_shorter_than_by_the_model() -> None:
    found = only_check(alone(8.0), run())
    assert found.measured_s < found.model_range_s[0] and not found.holds
    assert found.problem == (
        "the computation of a step took 40.00 ms of processor time, and in the run one, which the "
        "model uses, 80.00 ms. Measure again on a quiet machine."
    )
    # Ten messages in each step would take longer than the measured step.
    entry = {**run().collectives[0], "calls": 1000, "bytes": 4_000_000}  # type: ignore[index]
    fast = only_check(
        run(train_s=2.0, communication_exposed_s=0.0, compute_cpu_s=2.0, collectives=[entry])
    )
    assert "messages took less time than by the model" in fast.problem


def test_some_runs_are_not_checked_and_the_reason_is_named() -> None:
    """The model takes waiting from a run without processor time, so this would always pass."""
    for name in ("compute_cpu_s", "communication_cpu_s"):
        without = run(**{name: None}, train_s=99.0)
        assert check_repeats([without], 4) == []
        assert why_unchecked([without], 4) == "they have no processor time"
    shared = run(machine={"cores": 1, "hosts": 1}, train_s=9.0)
    assert check_repeats([shared], 4) == []
    assert why_unchecked([shared], 4) == (
        "2 workers shared 1 core, and the model gives each one a core"
    )
    assert check_repeats([alone(4.0)], 1) == []
    assert why_unchecked([alone(4.0)], 4) == "they have no step of several workers"


def test_repeats_are_checked_by_their_medians_on_each_network() -> None:
    runs = [run(train_s=100 * step_s) for step_s in (0.042, 0.043, 0.2)]
    assert only_check(*runs).measured_s == pytest.approx(0.043)
    other = run(configuration={**run().configuration, "network": "100mbit,20ms"})
    first, second = check_repeats([*runs, other], 4)
    assert (str(first.network), str(second.network)) == ("1gbit,0.5ms", "100mbit,20ms")
    assert first.holds and not second.holds
    # A prediction starts from the runs with the nearest number of workers.
    entry = {**run().collectives[0], "group": 4}  # type: ignore[index]
    four = run(
        configuration={**run().configuration, "workers": 4},
        machine={"cores": 4, "hosts": 1},
        collectives=[entry],
    )
    assert [check.workers for check in check_repeats([*runs, four], 8)] == [4]
    assert [check.workers for check in check_repeats([*runs, four], 2)] == [2]


def test_failed_checks_widen_a_range_by_their_factor() -> None:
    network = get_network("datacenter")
    good = Check(network, 2, 0.011, 0.010, (0.009, 0.012), "")
    longer, shorter = (
        dataclasses.replace(good, measured_s=measured_s, problem="reason")
        for measured_s in (0.04, 0.005)
    )
    assert widened(0.1, (0.09, 0.12), [good]) == (0.09, 0.12)
    assert widened(0.1, (0.09, 0.12), [good, longer]) == pytest.approx((0.09, 0.4))
    assert widened(0.1, (0.09, 0.12), [longer, shorter]) == pytest.approx((0.05, 0.4))
    # One worker has no range by the validation.
    assert widened(0.1, None, [good]) is None
    assert widened(0.1, None, [longer]) is None
    # The widened range contains the measured step.
    low_s, high_s = widened(longer.model_s, longer.model_range_s, [longer]) or (0.0, 0.0)
    assert low_s <= longer.measured_s <= high_s
