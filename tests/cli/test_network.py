"""network list and show."""

from __future__ import annotations

import json

from mlbench_core.network.named import NETWORKS
from tests.cli.conftest import Call


def test_the_list_has_every_name(call: Call) -> None:
    lines = [line.split() for line in call("network", "list").stdout.splitlines()]
    assert [line[0] for line in lines[1:]] == list(NETWORKS)
    assert [known["name"] for known in json.loads(call("network", "list", "--json").stdout)] == list(NETWORKS)


def test_show_describes_a_name_and_a_text(call: Call) -> None:
    shown = call("network", "show", "two-sites").stdout
    assert "hosts:        4: 2 racks of 2" in shown
    assert "between:      127 Mbit/s in each direction, round trip 90 ms" in shown
    assert NETWORKS["two-sites"].source in shown
    shown = call("network", "show", "unlimited, 5ms, 1ms-jitter, 2%-loss; host1: 10mbit").stdout
    assert "links:        no limit, round trip 5 ms, jitter 1 ms, loss 2 %" in shown
    assert "host 1:       10mbit" in shown
    found = json.loads(call("network", "show", "--json", "100mbit,21ms").stdout)
    assert (found["text"], found["link"]["round_trip_s"], found["source"]) == ("100mbit,21ms", 0.021, None)


def test_a_wrong_network_is_a_wrong_use(call: Call) -> None:
    assert "did you mean 'lan-1g'" in call("network", "show", "lan1g", code=2).stderr
