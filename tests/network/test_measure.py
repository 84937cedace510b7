"""The measurement of an emulated network."""

from __future__ import annotations

import pytest

from mlbench_core.errors import ConfigurationError
from mlbench_core.network import measure
from mlbench_core.network.description import Link
from mlbench_core.network.measure import PathReport, measure_network
from mlbench_core.network.parsing import parse_network
from tests.network.test_emulated import needs_namespaces


@needs_namespaces
def test_every_kind_of_path_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_all_reduce", lambda *_: ())
    monkeypatch.setattr(measure, "_DATAGRAMS", 500)
    monkeypatch.setattr(measure, "_LEAST_SKIP_S", 0.1)
    network = parse_network("20mbit,4ms,2%-loss; host1: 8mbit; host0: cut@0s; host2: 1%-cpu")

    def is_disturbed(path: PathReport, bandwidth: float) -> bool:
        is_right = 0.1 * bandwidth < path.bandwidth < 1.2 * bandwidth
        return not is_right or not 0 < (path.loss or 0) < 0.06

    # A program that gets no core for a moment spoils a measurement.
    for _ in range(10):
        report = measure_network(network, None, 0.3)
        if not any(map(is_disturbed, report.paths, (8e6, 20e6))):
            break
    assert (report.hosts, [(path.source, path.target) for path in report.paths]) == (
        3,
        [(0, 1), (0, 2)],
    )
    slow, fast = report.paths
    assert 0.1 * 8e6 < slow.bandwidth < 1.2 * 8e6
    assert 0.1 * 20e6 < fast.bandwidth < 1.2 * 20e6
    for path in report.paths:
        assert 0.004 <= path.round_trips_s[0] <= path.round_trip_s <= path.round_trips_s[1]
        assert path.loss is not None
        assert 0 < path.loss < 0.06


@needs_namespaces
def test_a_small_and_a_large_all_reduce_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        measure, "_path", lambda *_: PathReport(0, 1, Link(None), 1e6, 0, (0, 0), None)
    )
    small, large = measure_network(parse_network("100mbit,4ms"), None, 0.1).all_reduce
    assert (small.num_bytes, small.seconds >= 0.004) == (4, True)
    assert large.num_bytes == 65_536
    assert large.bus_bandwidth == pytest.approx(8 * large.num_bytes / large.seconds)
    assert large.bus_bandwidth < 100e6


@needs_namespaces
def test_a_failed_measurement_has_the_last_line_of_its_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measure, "_PINGS", "many")
    with pytest.raises(
        ConfigurationError, match=r"a measurement of the network failed: ValueError: .*'many'"
    ):
        measure_network(parse_network("1gbit"))


def test_a_measurement_needs_two_hosts() -> None:
    with pytest.raises(ValueError, match="hosts must be at least 2, not 1: a link needs two ends"):
        measure_network(parse_network("1gbit"), 1)
