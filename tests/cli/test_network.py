"""network list, show, test and clean."""

from __future__ import annotations

import json

import pytest

from mlbench_core.network.description import Link, Network
from mlbench_core.network.emulated import EmulatedNetwork
from mlbench_core.network.measure import AllReduceTime, NetworkReport, PathReport
from mlbench_core.network.named_networks import NETWORKS
from tests.cli.conftest import Call


def test_the_list_has_every_name(call: Call) -> None:
    lines = [line.split() for line in call("network", "list").stdout.splitlines()]
    assert [line[0] for line in lines[1:]] == list(NETWORKS)
    assert [
        known["name"] for known in json.loads(call("network", "list", "--json").stdout)
    ] == list(NETWORKS)


def test_show_describes_a_name_and_a_text(call: Call) -> None:
    shown = call("network", "show", "two-sites").stdout
    assert "hosts:        4: 2 racks of 2" in shown
    assert "between:      127 Mbit/s in each direction, round trip 90 ms" in shown
    assert NETWORKS["two-sites"].source in shown
    shown = call("network", "show", "unlimited, 5ms, 1ms-jitter, 2%-loss; host1: 10mbit").stdout
    assert "links:        no limit, round trip 5 ms, jitter 1 ms, loss 2 %" in shown
    assert "host 1:       10mbit" in shown
    found = json.loads(call("network", "show", "--json", "100mbit,21ms").stdout)
    assert (found["text"], found["link"]["round_trip_s"], found["source"]) == (
        "100mbit,21ms",
        0.021,
        None,
    )


def test_a_wrong_network_is_a_wrong_use(call: Call) -> None:
    assert "did you mean 'lan-1g'" in call("network", "show", "lan1g", code=2).stderr


@pytest.fixture
def measured(patch: pytest.MonkeyPatch) -> list[tuple[str, int | None]]:
    """The calls of ``measure_network``, which answers without a network."""
    calls: list[tuple[str, int | None]] = []

    def measure_network(network: Network, hosts: int | None) -> NetworkReport:
        calls.append((str(network), hosts))
        network.check_hosts(hosts or 2)
        paths = (
            PathReport(
                0, 1, Link(10**8, 0.02, 0.002, 0.001), 95e6, 0.0204, (0.0185, 0.0217), 0.0015
            ),
            PathReport(0, 2, Link(None), 5e9, 0.0001, (0.0001, 0.0001), None),
        )
        machine = {"cores": 2, "load": 0.1, "congestion_control": "cubic", "root": True}
        return NetworkReport(str(network), 3, paths, (AllReduceTime(1000, 0.5, 9.1e6),), machine)

    patch.setattr("mlbench_core.network.measure.measure_network", measure_network)
    return calls


def test_test_prints_what_was_asked_beside_what_was_measured(
    call: Call, measured: list[tuple[str, int | None]]
) -> None:
    answer = call("network", "test", "100mbit,20ms", "--hosts", "3")
    assert measured == [("100mbit,20ms", 3)]
    rows = [" ".join(line.split()) for line in answer.stdout.splitlines()]
    assert rows[1:] == [
        "0-1 bandwidth 100.0 Mbit/s 95.0 Mbit/s -5.0%",
        "round trip 20.0 ms 20.4 ms +2.0%",
        "its range 18.0 to 22.0 ms 18.5 to 21.7 ms",
        "loss 0.10% 0.15%",
        "0-2 bandwidth no limit 5,000.0 Mbit/s",
        "round trip 0 ms 0.10 ms +0.10 ms",
        "all all-reduce of 1,000 B 500.00 ms",
        "its bus bandwidth 9.1 Mbit/s",
    ]
    assert (
        "3 hosts on 2 cores, load 0.1 at the start, TCP congestion control cubic" in answer.stderr
    )
    found = json.loads(call("network", "test", "lan-1g", "--json").stdout)
    assert (found["network"], found["paths"][0]["loss"]) == ("1gbit", 0.0015)


def test_test_refuses_a_number_of_hosts(call: Call, measured: list[tuple[str, int | None]]) -> None:
    assert (
        "must be 4 (2 racks of 2), not 3"
        in call("network", "test", "two-racks", "--hosts", "3", code=2).stderr
    )


def test_clean_names_what_it_removed(call: Call, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EmulatedNetwork, "cleanup", staticmethod(lambda: ["mlbench-1-2-3-h0"]))
    answer = call("network", "clean")
    assert (answer.stdout, answer.stderr) == ("mlbench-1-2-3-h0\n", "removed 1 namespaces\n")
    assert json.loads(call("network", "clean", "--json").stdout) == ["mlbench-1-2-3-h0"]
