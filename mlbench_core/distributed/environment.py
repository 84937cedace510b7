"""Find out how the workers of a run were started, and the place of this worker among them.

Every launcher (torchrun, ``mpirun``, SLURM) sets its own environment variables with rank and world
size. A class for each launcher reads these variables, and :func:`detect_environment` chooses the
class.
"""

from __future__ import annotations

import os
import re
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from mlbench_core.addresses import is_loopback
from mlbench_core.distributed.interfaces import resolves
from mlbench_core.errors import ConfigurationError

__all__ = [
    "DEFAULT_PORT",
    "ClusterEnvironment",
    "HostsEnvironment",
    "MPICHEnvironment",
    "MPIWorldEnvironment",
    "OpenMPIEnvironment",
    "Place",
    "SingleProcessEnvironment",
    "SlurmEnvironment",
    "TorchrunEnvironment",
    "detect_environment",
]

DEFAULT_PORT = 29500
"""Port of the rendezvous if ``MASTER_PORT`` names none; torchrun's default too."""

# A SLURM controller under load may not answer; the node's name is used then.
_SCONTROL_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Place:
    """A worker's place in the world.

    Attributes:
        rank: Its number among all workers, from 0.
        world_size: Number of workers.
        local_rank: Its number among the workers of its machine, from 0.
        master_address: Host of rank 0, at which the workers meet; None for a worker alone.
        master_port: Port of the rendezvous.
    """

    rank: int
    world_size: int
    local_rank: int = 0
    master_address: str | None = None
    master_port: int = DEFAULT_PORT

    def variables(self) -> dict[str, str]:
        """Return the variables from which torch reads this place; none for a worker alone."""
        if self.master_address is None:
            return {}
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "MASTER_ADDR": self.master_address,
            "MASTER_PORT": str(self.master_port),
        }


class ClusterEnvironment(ABC):
    """One way of starting workers, read from environment variables.

    Args:
        environment: The environment variables; by default those of this process.
    """

    name: ClassVar[str]

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        if environment is None:
            environment = os.environ
        self.environment = environment

    def is_active(self) -> bool:
        """Return True if this process was started this way; always if the way leaves no trace."""
        return True

    @abstractmethod
    def place(self) -> Place:
        """Return this worker's place.

        Raises:
            ConfigurationError: A variable is missing or not a number, or the numbers contradict
                each other.
        """

    def read_rank(self) -> int:
        """Read this worker's rank, without looking for the other workers.

        Raises:
            ConfigurationError: As in :meth:`place`.
        """
        return self.place().rank

    def is_on_one_machine(self, place: Place) -> bool:
        """Return True if all workers are known to run here, so nobody else needs to reach them.

        Args:
            place: This worker's place, from :meth:`place`.
        """
        loopback = place.master_address is not None and is_loopback(place.master_address)
        return place.world_size == 1 or loopback or self._num_local() == place.world_size

    def _num_local(self) -> int:
        """Return the number of workers on this machine; 0 if it is not known."""
        return 0

    def _has(self, *names: str) -> bool:
        # A variable that is set to nothing counts as missing.
        return all(map(self.environment.get, names))

    def _integer(self, name: str, default: int | None = None) -> int:
        text = self.environment.get(name)
        if not text and default is not None:
            return default
        try:
            return int(text or "")
        except ValueError:
            raise ConfigurationError(
                f"the environment variable {name} must be a whole "
                f"number, as {self.name} sets it, not {text!r}"
            ) from None

    def _port(self, default: int = DEFAULT_PORT) -> int:
        port = self._integer("MASTER_PORT", default)
        if not 0 < port < 65536:
            raise ConfigurationError(f"MASTER_PORT must be a port from 1 to 65535, not {port}")
        return port

    def _checked(self, place: Place) -> Place:
        if place.world_size < 1 or not 0 <= place.rank < place.world_size:
            raise ConfigurationError(
                f"{self.name} gives rank {place.rank} in a world of {place.world_size}; the rank "
                "must be at least 0 and below the world size"
            )
        return place


class HostsEnvironment(ClusterEnvironment):
    """Workers started by hand with ``--hosts a,b --rank i``: one worker for each entry.

    The first host is the rendezvous.

    Args:
        hosts: Host names or addresses by rank. A host that runs several workers is named several
            times.
        rank: This worker's number in ``hosts``; may be left at -1 if ``hosts`` has one entry.
        environment: As in :class:`ClusterEnvironment`; ``MASTER_PORT`` is the rendezvous' port.

    Raises:
        ValueError: An entry is empty, or ``rank`` lies outside ``hosts``.

    Example:
        >>> HostsEnvironment("10.0.0.1,10.0.0.2", 1, {}).place()
        Place(rank=1, world_size=2, local_rank=0, master_address='10.0.0.1', master_port=29500)
    """

    name = "--hosts"

    def __init__(
        self, hosts: str | Sequence[str], rank: int, environment: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(environment)
        entries = hosts
        if isinstance(hosts, str):
            entries = hosts.split(",")
        self.hosts = [str(host).strip() for host in entries]
        if not self.hosts or not all(self.hosts):
            raise ValueError(
                f"hosts must be host names separated by commas, one for each worker, not {hosts!r}"
            )
        if rank == -1 and len(self.hosts) == 1:
            rank = 0
        if not 0 <= rank < len(self.hosts):
            raise ValueError(
                f"rank is {rank}, but hosts names {len(self.hosts)} workers "
                f"({','.join(self.hosts)}): rank must be 0 to "
                f"{len(self.hosts) - 1}, another one for each worker"
            )
        self.rank = rank

    def place(self) -> Place:
        # Workers of one machine have the same entry: those named earlier come first on its GPUs.
        local_rank = self.hosts[: self.rank].count(self.hosts[self.rank])
        return Place(self.rank, len(self.hosts), local_rank, self.hosts[0], self._port())

    def _num_local(self) -> int:
        return self.hosts.count(self.hosts[self.rank])


class TorchrunEnvironment(ClusterEnvironment):
    """Workers started by ``torchrun``, or by anything else that sets torch's four variables.

    These are RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    Example:
        >>> variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "4000"}
        >>> TorchrunEnvironment(variables).place()
        Place(rank=1, world_size=2, local_rank=0, master_address='a', master_port=4000)
    """

    name = "torchrun"

    def is_active(self) -> bool:
        return self._has("RANK", "WORLD_SIZE")

    def read_rank(self) -> int:
        return self._checked(Place(self._integer("RANK"), self._integer("WORLD_SIZE"))).rank

    def place(self) -> Place:
        rank, world_size = self._integer("RANK"), self._integer("WORLD_SIZE")
        address = self.environment.get("MASTER_ADDR")
        if not address and world_size > 1:
            raise ConfigurationError(
                f"RANK={rank} and WORLD_SIZE={world_size} are set, but MASTER_ADDR is "
                "not: set it to the host of rank 0, start the workers with torchrun, or "
                "unset RANK and WORLD_SIZE to run alone"
            )
        local_rank = self._integer("LOCAL_RANK", 0)
        return self._checked(Place(rank, world_size, local_rank, address or None, self._port()))

    def _num_local(self) -> int:
        return self._integer("LOCAL_WORLD_SIZE", 0)


class _MPIEnvironment(ClusterEnvironment):
    """Workers started by an ``mpirun``, whose subclasses name the variables that it sets."""

    rank_name: ClassVar[str]
    size_name: ClassVar[str]
    local_rank_name: ClassVar[str]
    local_size_name: ClassVar[str]

    def is_active(self) -> bool:
        return self._has(self.rank_name, self.size_name)

    def read_rank(self) -> int:
        return self._integer(self.rank_name)

    def place(self) -> Place:
        rank, size = self._integer(self.rank_name), self._integer(self.size_name)
        address = self.environment.get("MASTER_ADDR")
        if not address and size > 1:
            # An mpirun does not name the host of rank 0. It is this host
            # only if all workers run here.
            if self._integer(self.local_size_name, 0) != size:
                raise ConfigurationError(
                    f"{self.name} started {size} workers on more than one host, and none knows "
                    "where rank 0 is: set MASTER_ADDR to the first host's address for all (mpirun "
                    "-x MASTER_ADDR=... with Open MPI, -genv MASTER_ADDR ... with MPICH)"
                )
            address = "127.0.0.1"
        local_rank = self._integer(self.local_rank_name, 0)
        return self._checked(Place(rank, size, local_rank, address or None, self._port()))

    def _num_local(self) -> int:
        return self._integer(self.local_size_name, 0)


class OpenMPIEnvironment(_MPIEnvironment):
    """Workers started by Open MPI's ``mpirun``.

    Over several hosts it needs ``-x MASTER_ADDR=<first host>``.
    """

    name = "Open MPI's mpirun"
    rank_name = "OMPI_COMM_WORLD_RANK"
    size_name = "OMPI_COMM_WORLD_SIZE"
    local_rank_name = "OMPI_COMM_WORLD_LOCAL_RANK"
    local_size_name = "OMPI_COMM_WORLD_LOCAL_SIZE"


class MPICHEnvironment(_MPIEnvironment):
    """Workers started by MPICH's or Intel's ``mpirun``.

    Over several hosts it needs ``-genv MASTER_ADDR <host>``.
    """

    name = "MPICH's mpirun"
    rank_name = "PMI_RANK"
    size_name = "PMI_SIZE"
    local_rank_name = "MPI_LOCALRANKID"
    local_size_name = "MPI_LOCALNRANKS"


class MPIWorldEnvironment(ClusterEnvironment):
    """Workers of the backend ``mpi``, started in any way: MPI gives rank and world size.

    The workers send each other their hosts, so ``MASTER_ADDR`` need not be set. :meth:`place`
    starts MPI.

    Args:
        expected: The environment given by hand (``--hosts`` and ``--rank``) or by torchrun, if any;
            MPI must agree.
        hosts: The hosts that were given by hand, if any: one for each of MPI's workers.
        environment: As in :class:`ClusterEnvironment`.
    """

    name = "MPI"

    def __init__(
        self,
        expected: ClusterEnvironment | None = None,
        hosts: str | Sequence[str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(environment)
        self.expected = expected
        self.hosts = hosts

    def is_active(self) -> bool:
        return self._has("OMPI_COMM_WORLD_SIZE") or self._has("PMI_SIZE") or self._has("PMIX_RANK")

    def place(self) -> Place:
        from mlbench_core.distributed.pytorch import mpi  # loads torch

        world = mpi.world()
        mpi.check_variables(world, self.environment)
        if self.hosts:
            size = len(HostsEnvironment(self.hosts, 0).hosts)
            mpi.check_launch(world, -1, size, HostsEnvironment.name)
        if self.expected is not None:
            expected = self.expected.place()
            mpi.check_launch(world, expected.rank, expected.world_size, self.expected.name)
        if world.size == 1:
            return Place(rank=0, world_size=1)
        # Each worker knows only its own host; the list of all gives the
        # local rank and the rendezvous.
        hosts = world.hosts()
        local_rank = hosts[: world.rank].count(hosts[world.rank])
        address = self.environment.get("MASTER_ADDR")
        if not address:
            address = hosts[0]
            # On one machine, no other interface has to be reachable.
            if len(set(hosts)) == 1:
                address = "127.0.0.1"
        return self._checked(Place(world.rank, world.size, local_rank, address, self._port()))


class SlurmEnvironment(ClusterEnvironment):
    """Workers started by SLURM's ``srun``, one per task; the rendezvous is the first node.

    Its address is ``MASTER_ADDR`` if that is set. Otherwise it is the node's name if the name
    resolves here. If not, it is the address by which SLURM reaches the node (``NodeAddr`` of
    ``scontrol show node``).

    Without ``MASTER_PORT`` the port comes from the job's number, so that jobs that share a node use
    different ports. The shell of ``sbatch`` or ``salloc`` itself is not a worker, although it sees
    the same variables as task 0.

    Example:
        >>> variables = {"SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0",
        ...              "SLURM_JOB_ID": "71234",
        ...              "SLURM_NODELIST": "node[07-08]"}
        >>> SlurmEnvironment(variables).place()
        Place(rank=2, world_size=4, local_rank=0, master_address='node07', master_port=26234)
    """

    name = "SLURM's srun"

    def is_active(self) -> bool:
        # Only srun makes a step. Without one this is the shell of sbatch or salloc,
        # which has the same variables.
        if not self._has("SLURM_STEP_ID"):
            if self.environment.get("ENVIRONMENT") == "BATCH":
                return False
            if self.environment.get("SLURM_JOB_NAME") in ("bash", "interactive"):
                return False
        has_size = self._has("SLURM_STEP_NUM_TASKS") or self._has("SLURM_NTASKS")
        return self._has("SLURM_PROCID") and has_size

    def read_rank(self) -> int:
        return self._integer("SLURM_PROCID")

    def place(self) -> Place:
        size_name = "SLURM_NTASKS"
        # A step may have fewer tasks than the job.
        if self._has("SLURM_STEP_NUM_TASKS"):
            size_name = "SLURM_STEP_NUM_TASKS"
        size = self._integer(size_name)
        nodes = ""
        for name in self._node_lists:
            # The list of the step comes first: rank 0 runs on the first node of the step.
            if self._has(name):
                nodes = self.environment[name]
                break
        address = self.environment.get("MASTER_ADDR") or _slurm_address(nodes)
        if not address and size > 1:
            raise ConfigurationError(
                f"SLURM started {size} tasks, but none of "
                f"{', '.join(self._node_lists)} names the nodes: set MASTER_ADDR"
            )
        # Ports 15000 to 34999 by the job's number: two jobs on one node rarely get the same port.
        port = self._port(15000 + self._integer("SLURM_JOB_ID", DEFAULT_PORT - 15000) % 20000)
        rank, local_rank = self._integer("SLURM_PROCID"), self._integer("SLURM_LOCALID", 0)
        return self._checked(Place(rank, size, local_rank, address or None, port))

    def _num_local(self) -> int:
        # A step may use fewer nodes than its job. Tasks on one node are all of the step's.
        nodes = self._integer("SLURM_STEP_NUM_NODES", self._integer("SLURM_NNODES", 0))
        if nodes != 1:
            return 0
        return self._integer("SLURM_STEP_NUM_TASKS", self._integer("SLURM_NTASKS", 0))

    _node_lists: ClassVar[tuple[str, ...]] = (
        "SLURM_STEP_NODELIST",
        "SLURM_JOB_NODELIST",
        "SLURM_NODELIST",
    )


class SingleProcessEnvironment(ClusterEnvironment):
    """A single worker: a world of size 1 that opens no port."""

    name = "no launcher"

    def place(self) -> Place:
        return Place(rank=0, world_size=1)


def first_slurm_host(nodes: str) -> str:
    """Return the first name in SLURM's short form of a list of nodes; empty for an empty list.

    Example:
        >>> first_slurm_host("gpu-[003-005,9]-ib,login1"), first_slurm_host("r[1-2]n[07-08]")
        ('gpu-003-ib', 'r1n07')
    """
    # A comma inside brackets separates numbers, not nodes; so the first entry ends at a comma
    # outside brackets.
    match = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes.strip())
    if match is None:
        return ""
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", match.group())


def _slurm_address(nodes: str) -> str:
    """Return the first node's name, or SLURM's address for it if the name does not resolve."""
    name = first_slurm_host(nodes)
    if "[" in nodes:
        # scontrol knows the short form completely; first_slurm_host() is for hosts without it, such
        # as containers.
        listed = _scontrol("show", "hostnames", nodes).split()
        if listed:
            name = listed[0]
    if not name or resolves(name):
        return name
    match = re.search(r"\bNodeAddr=(\S+)", _scontrol("show", "node", name))
    if not match:
        return name
    return match.group(1)


def _scontrol(*arguments: str) -> str:
    """Return the output of SLURM's ``scontrol``; empty if it is missing, fails or is too slow."""
    try:
        command, limit_s = ["scontrol", *arguments], _SCONTROL_TIMEOUT_S
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    if done.returncode != 0:
        return ""
    return done.stdout


def detect_environment(
    hosts: str | Sequence[str] | None = None,
    rank: int = -1,
    environment: Mapping[str, str] | None = None,
) -> ClusterEnvironment:
    """Find out how this worker was started.

    torchrun comes first if its agent runs, because the agent already provides the rendezvous. Then
    come ``hosts`` with ``rank``, and then the variables of the other launchers. A process that none
    of them started is alone.

    Args:
        hosts: Hosts of the workers by rank, as in :class:`HostsEnvironment`; None or empty if not
            given by hand.
        rank: This worker's rank in ``hosts``; -1 if not given by hand.
        environment: The environment variables; by default those of this process.

    Returns:
        The environment; nothing has been contacted yet.

    Raises:
        ValueError: ``rank`` lies outside ``hosts``, or is given without hosts and without a
            launcher.

    Example:
        >>> detect_environment("a,b", 0, {}).name
        '--hosts'
    """
    if environment is None:
        environment = os.environ
    # TORCHELASTIC_RUN_ID shows that torchrun's agent runs. RANK and WORLD_SIZE alone may come from
    # elsewhere: hosts given by hand take precedence over them.
    torchrun = TorchrunEnvironment(environment)
    if torchrun.is_active() and (environment.get("TORCHELASTIC_RUN_ID") or not hosts):
        return torchrun
    launchers = (
        OpenMPIEnvironment(environment),
        MPICHEnvironment(environment),
        SlurmEnvironment(environment),
    )
    launcher = next((candidate for candidate in launchers if candidate.is_active()), None)
    # Without a rank, the launcher says which of the hosts this worker is.
    if launcher is not None and (not hosts or rank == -1):
        return launcher
    if hosts:
        return HostsEnvironment(hosts, rank, environment)
    if rank > 0:
        raise ValueError(
            f"rank is {rank}, but there are no hosts: name every worker's host (--hosts a,b "
            f"--rank {rank}), start the workers with torchrun, or leave the rank out to run alone"
        )
    return SingleProcessEnvironment(environment)
