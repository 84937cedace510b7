"""Which interface leads to the other workers."""

from __future__ import annotations

import socket
import subprocess
import sys

import psutil
import pytest

from mlbench_core.distributed.interfaces import (
    interface_towards,
    interface_variables,
    own_addresses,
)
from mlbench_core.network.emulated import EmulatedNetwork
from tests.helpers.processes import environment

REASON = EmulatedNetwork.why_not()


def own_address() -> tuple[str, str]:
    """An interface of this machine that is not the loopback one, and its address."""
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family == socket.AF_INET and not entry.address.startswith("127."):
                return name, entry.address
    pytest.skip("this machine has no network interface with an IPv4 address")


def test_the_interface_of_this_machines_own_address() -> None:
    name, address = own_address()
    assert interface_towards(address) == name
    assert interface_variables(address, {}) == {
        "GLOO_SOCKET_IFNAME": name,
        "TP_SOCKET_IFNAME": name,
        "NCCL_SOCKET_IFNAME": f"={name}",
    }


def test_own_addresses_are_those_that_others_can_reach() -> None:
    _, address = own_address()
    found = own_addresses()
    assert address in found and not {"127.0.0.1", "::1"} & set(found)
    assert [":" in each for each in found] == sorted(":" in each for each in found)  # IPv4 first


def test_what_the_user_has_set_stays() -> None:
    name, address = own_address()
    found = interface_variables(address, {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "ib0"})
    assert found == {"TP_SOCKET_IFNAME": name}


@pytest.mark.parametrize("address", [None, "", "no-such-host.invalid"])
def test_nothing_is_set_where_the_host_is_unknown(address: str | None) -> None:
    assert interface_variables(address, {}) == {}


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_workers_of_one_machine_stay_on_its_loopback_interface(address: str) -> None:
    name = interface_variables(address, {})["GLOO_SOCKET_IFNAME"]
    assert "127.0.0.1" in [entry.address for entry in psutil.net_if_addrs()[name]]


@pytest.mark.skipif(REASON is not None, reason=f"emulated network: {REASON}")
def test_another_hosts_address_leads_out_of_the_right_interface() -> None:
    code = (
        "from mlbench_core.distributed.interfaces import "
        "interface_towards as f; print(f('10.77.0.2'))"
    )
    with EmulatedNetwork(2) as network:
        process = network.popen(
            0, [sys.executable, "-c", code], environment(), stdout=subprocess.PIPE, text=True
        )
        assert process.communicate(timeout=240)[0] == "eth0\n"
