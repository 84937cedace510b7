"""Run each worker of a local run on a separate host in an emulated network."""

from __future__ import annotations

from collections.abc import Callable

from mlbench_core.errors import ConfigurationError
from mlbench_core.network.emulated import INTERFACE, EmulatedNetwork
from mlbench_core.network.parsing import parse_network
from mlbench_master.engines.interface import Job

__all__ = [
    "FILE",
    "check_network",
    "host_addresses",
    "open_network",
    "place_worker",
    "shared_variables",
]

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


def check_network(
    text: str, first_workers: int, most_workers: int, backend: str, *, all_nodes: bool
) -> list[str]:
    """Refuse a network that a run on this machine cannot have.

    Args:
        text: The description of the network.
        first_workers: Number of workers that start together.
        most_workers: Largest number of workers that live at the same time.
        backend: The backend of their communication.
        all_nodes: True if every worker runs the command.

    Returns:
        Sentences for the run's log.

    Raises:
        ValueError: The network is wrong, or this machine cannot emulate it.
    """
    network = parse_network(text)
    network.check_hosts(most_workers)
    late = [host for host, settings in network.hosts.items() if settings.join_s]
    if most_workers - len(late) < first_workers:
        raise ValueError(
            f"must have a host for each of the first {first_workers} workers from the start, not "
            f"{text!r}, in which {len(late)} of {most_workers} hosts join later: start an elastic "
            "run with fewer workers"
        )
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
        env.update(shared_variables(job))


def shared_variables(job: Job) -> dict[str, str]:
    """Return the variables of every worker on an emulated host; empty without a network."""
    if not job.network:
        return {}
    return {
        "GLOO_SOCKET_IFNAME": INTERFACE,
        # The result names it: runs on different networks are not repeats of each other.
        "MLBENCH_NETWORK": job.network,
        # Attempts to reach the master would disturb the training, and each worker would wait for it
        # at its end.
        "MLBENCH_SPOOL_ONLY": "1",
    }


def host_addresses(job: Job) -> list[str]:
    """Return the address of each worker's host."""
    if not job.network:
        return ["127.0.0.1"] * job.num_workers
    network = EmulatedNetwork(job.most_workers, network=job.network)
    return list(map(network.address, range(job.most_workers)))


def open_network(
    text: str, hosts: int, say: Callable[[str], None], *, has_extra_host: bool
) -> EmulatedNetwork:
    """Create the hosts of a run, and one for its store if it is elastic.

    Raises:
        OSError: This machine cannot emulate the network.
    """
    try:
        network = EmulatedNetwork(hosts, network=text, has_extra_host=has_extra_host, say=say)
        return network.__enter__()
    except (ConfigurationError, ValueError) as error:
        # As for a command that cannot start.
        raise OSError(str(error)) from error
