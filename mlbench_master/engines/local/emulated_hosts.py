"""Run each worker of a local run on a separate host in an emulated network."""

from __future__ import annotations

from mlbench_core.errors import ConfigurationError
from mlbench_core.network.emulated import EmulatedNetwork
from mlbench_core.network.parsing import parse_network
from mlbench_master.engines.interface import Job

__all__ = ["FILE", "check_network", "host_addresses", "open_network", "place_worker"]

FILE = "network"
"""The file in the folder of a run that exists if the run has an emulated network."""

# Backends whose traffic would not pass through the emulated network.
_WHY_NOT = {
    "nccl": "workers of one machine use its memory",
    "mpi": "mpirun starts all workers on one host",
}
_NOTE = (
    "note: the workers cannot reach the master from their emulated hosts, so it reads their "
    "metrics from disk every 2 s"
)


def check_network(text: str, num_workers: int, backend: str, *, all_nodes: bool) -> list[str]:
    """Refuse a network that a run on this machine cannot have.

    Args:
        text: The description of the network.
        num_workers: Number of workers.
        backend: The backend of their communication.
        all_nodes: True if every worker runs the command.

    Returns:
        Sentences for the run's log.

    Raises:
        ValueError: The network is wrong, or this machine cannot emulate it.
    """
    parse_network(text).check_hosts(num_workers)
    if backend in _WHY_NOT:
        raise ValueError(
            f"must be left out with backend {backend}, not {text!r}: {_WHY_NOT[backend]}; choose "
            "the backend gloo"
        )
    if not all_nodes:
        raise ValueError(
            f"must be left out if only worker 0 runs the command, not {text!r}: set run_all_nodes"
        )
    reason = EmulatedNetwork.why_not()
    if reason is not None:
        raise ValueError(
            f"must be left out, not {text!r}: this machine cannot emulate a network: {reason}"
        )
    return [_NOTE]


def place_worker(job: Job, port: int, env: dict[str, str], rank: int) -> None:
    """Add the variables of a worker's emulated host to its environment, if there is a network."""
    if job.network:
        env.update(EmulatedNetwork(job.num_workers, network=job.network).environment(rank, port))
        # The result names it: runs on different networks are not repeats of each other.
        env["MLBENCH_NETWORK"] = job.network
        # Attempts to reach the master would disturb the training, and each worker would wait for it
        # at its end.
        env["MLBENCH_SPOOL_ONLY"] = "1"


def host_addresses(job: Job) -> list[str]:
    """Return the address of each worker's host."""
    if not job.network:
        return ["127.0.0.1"] * job.num_workers
    network = EmulatedNetwork(job.num_workers, network=job.network)
    return list(map(network.address, range(job.num_workers)))


def open_network(text: str, num_workers: int) -> EmulatedNetwork:
    """Create the hosts of a run.

    Raises:
        OSError: This machine cannot emulate the network.
    """
    try:
        return EmulatedNetwork(num_workers, network=text).__enter__()
    except (ConfigurationError, ValueError) as error:
        # As for a command that cannot start.
        raise OSError(str(error)) from error
