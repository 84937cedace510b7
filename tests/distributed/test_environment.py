"""Where a worker finds its place: every launcher's variables, patched."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlbench_core.distributed.environment import (
    HostsEnvironment,
    MPICHEnvironment,
    OpenMPIEnvironment,
    Place,
    SingleProcessEnvironment,
    SlurmEnvironment,
    TorchrunEnvironment,
    detect_environment,
    first_slurm_host,
)
from mlbench_core.errors import ConfigurationError

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "10.0.0.9",
    "MASTER_PORT": "4001",
    "TORCHELASTIC_RUN_ID": "none",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu-[013-014,020]",
}


@pytest.mark.parametrize(
    ("environment", "kind", "place"),
    [
        (TORCHRUN, TorchrunEnvironment, Place(3, 4, 1, "10.0.0.9", 4001)),
        (OPEN_MPI, OpenMPIEnvironment, Place(1, 2, 1, "127.0.0.1", 29500)),
        (OPEN_MPI | {"MASTER_PORT": "4002"}, OpenMPIEnvironment, Place(1, 2, 1, "127.0.0.1", 4002)),
        (MPICH, MPICHEnvironment, Place(1, 2, 1, "127.0.0.1", 29500)),
        (SLURM, SlurmEnvironment, Place(5, 8, 1, "gpu-013", 15000 + 123456 % 20000)),
        (
            SLURM | {"MASTER_ADDR": "head", "MASTER_PORT": "4003"},
            SlurmEnvironment,
            Place(5, 8, 1, "head", 4003),
        ),
        ({}, SingleProcessEnvironment, Place(0, 1, 0, None)),
    ],
)
def test_launchers_are_recognised(environment: dict[str, str], kind: type, place: Place) -> None:
    found = detect_environment(environment=environment)
    assert type(found) is kind
    assert found.place() == place


def test_hosts_and_rank_given_by_hand() -> None:
    hosts = "10.0.0.1, 10.0.0.2,10.0.0.1"
    places = [detect_environment(hosts, rank, {"MASTER_PORT": "4000"}).place() for rank in range(3)]
    assert places == [
        Place(0, 3, 0, "10.0.0.1", 4000),
        Place(1, 3, 0, "10.0.0.1", 4000),
        Place(2, 3, 1, "10.0.0.1", 4000),
    ]
    assert HostsEnvironment(["a", "b"], 1, {}).place() == Place(1, 2, 0, "a", 29500)
    assert HostsEnvironment("a", -1, {}).place() == Place(0, 1, 0, "a", 29500)


@pytest.mark.parametrize("rank", [-1, 2, 7])
def test_a_rank_outside_the_hosts_names_both(rank: int) -> None:
    with pytest.raises(ValueError, match=rf"rank is {rank}.*2 workers \(a,b\).*0 to 1"):
        detect_environment("a,b", rank, {})


@pytest.mark.parametrize("hosts", ["a,,b", " ", ["a", ""]])
def test_an_empty_host_is_refused(hosts: str) -> None:
    with pytest.raises(ValueError, match="one for each worker"):
        detect_environment(hosts, 0, {})


def test_a_rank_without_hosts_and_launcher_is_refused() -> None:
    with pytest.raises(ValueError, match="rank is 1, but there are no hosts"):
        detect_environment(None, 1, {})
    assert isinstance(detect_environment(None, 0, {}), SingleProcessEnvironment)


def test_torchrun_comes_before_flags_and_flags_before_other_launchers() -> None:
    assert isinstance(detect_environment("a,b", 1, TORCHRUN), TorchrunEnvironment)
    without_agent = {
        name: value for name, value in TORCHRUN.items() if name != "TORCHELASTIC_RUN_ID"
    }
    assert isinstance(detect_environment(None, -1, without_agent), TorchrunEnvironment)
    assert isinstance(detect_environment("a,b", 1, without_agent), HostsEnvironment)
    assert isinstance(detect_environment("a,b", 1, OPEN_MPI), HostsEnvironment)
    for hosts in ("a,b", "a"):
        assert isinstance(detect_environment(hosts, -1, OPEN_MPI), OpenMPIEnvironment)


@pytest.mark.parametrize(
    ("environment", "rank"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2"}, 1),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, 1),
        (SLURM, 5),
        ({}, 0),
    ],
)
def test_a_rank_is_known_before_the_other_workers_are(
    environment: dict[str, str], rank: int
) -> None:
    assert detect_environment(environment=environment).read_rank() == rank


def test_the_shell_of_a_slurm_job_is_no_worker() -> None:
    shell = {name: value for name, value in SLURM.items() if "STEP" not in name}
    assert isinstance(
        detect_environment(environment=shell | {"ENVIRONMENT": "BATCH"}), SingleProcessEnvironment
    )
    assert isinstance(
        detect_environment(environment=shell | {"SLURM_JOB_NAME": "bash"}), SingleProcessEnvironment
    )
    assert isinstance(
        detect_environment(environment=SLURM | {"ENVIRONMENT": "BATCH"}), SlurmEnvironment
    )


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2"}, "MASTER_ADDR is not"),
        (TORCHRUN | {"RANK": "4"}, "rank 4 in a world of 4"),
        (TORCHRUN | {"RANK": "one"}, "RANK must be a whole number, .* not 'one'"),
        (
            TORCHRUN | {"MASTER_PORT": "70000"},
            "MASTER_PORT must be a port from 1 to 65535, not 70000",
        ),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "set MASTER_ADDR"),
        (
            {name: value for name, value in SLURM.items() if "NODELIST" not in name},
            "SLURM_NODELIST",
        ),
    ],
)
def test_what_is_wrong_with_the_variables_is_said(
    environment: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        detect_environment(environment=environment).place()


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("a,b", "a"),
        ("n[07-12]", "n07"),
        ("n[3,5]-ib,x", "n3-ib"),
        ("n[9]", "n9"),
        ("", ""),
    ],
)
def test_first_host_of_a_slurm_list(nodes: str, first: str) -> None:
    assert first_slurm_host(nodes) == first


def test_variables_of_a_place() -> None:
    assert Place(0, 1).variables() == {}
    assert Place(1, 2, 0, "a", 5).variables() == {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "5",
    }


SCONTROL = """#!/bin/sh
if [ "$1 $2" = "show hostnames" ]; then
    [ "$3" = "rack[1-2]-n[3-4]" ] || exit 1
    printf 'no-such-host.invalid\\nrack1-n4\\n'
elif [ "$1 $2 $3" = "show node no-such-host.invalid" ]; then
    echo "NodeName=no-such-host.invalid Arch=x86_64 CoresPerSocket=1"
    echo "   NodeAddr={address} NodeHostName=vm Version=22.05.8"
else
    exit 1
fi
"""


@pytest.mark.parametrize(
    ("address", "variables", "expected"),
    [
        ("127.0.0.7", {}, "127.0.0.7"),
        ("127.0.0.7", {"MASTER_ADDR": "10.1.2.3"}, "10.1.2.3"),
        (
            "127.0.0.7",
            {"SLURM_STEP_NODELIST": "127.0.0.9"},
            "127.0.0.9",
        ),  # what resolves is taken as it is
        (
            None,
            {},
            "rack1-n3",
        ),  # no scontrol: the name, which initialize_backends then refuses if it must
    ],
)
def test_slurm_says_where_a_node_is_whose_name_does_not_resolve(
    address: str | None,
    variables: dict[str, str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if address is not None:
        script = tmp_path / "scontrol"
        script.write_text(SCONTROL.replace("{address}", address))
        script.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        given = SLURM | {"SLURM_STEP_NODELIST": "rack[1-2]-n[3-4]"} | variables
        assert SlurmEnvironment(given).place().master_address == expected
