"""Hosts with a real sshd each, in network namespaces of this machine, for tests."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from mlbench_core.network import EmulatedNetwork
from tests.master.helpers import wait_for

SSHD = """\
Port 22
ListenAddress 0.0.0.0
HostKey {root}/host_key
AuthorizedKeysFile {root}/authorized_keys
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
PidFile none
PrintMotd no
PermitUserEnvironment no
"""
SSH = """\
Host {names}
    IdentityFile {root}/key
    IdentitiesOnly yes
    IdentityAgent none
    UserKnownHostsFile {root}/known_hosts
    GlobalKnownHostsFile none
    StrictHostKeyChecking yes
"""
NAMES = ("a", "b")
PROGRAMS = ("ssh", "sshd", "ssh-keygen")


def why_not() -> str:
    """Why no sshd can be started here; empty if one can."""
    missing = [name for name in PROGRAMS if _which(name) is None]
    if missing:
        return f"needs OpenSSH, and {', '.join(missing)} cannot be found"
    return EmulatedNetwork.why_not() or ""


def _which(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")


class SshHosts:
    """The hosts ``a`` and ``b``, and a third one on which ``ssh`` runs.

    Attributes:
        network: The network; hosts 0 and 1 are ``a`` and ``b``.
        ssh: The value of ``MLBENCH_SSH``.
        config: The file with the configuration of ``ssh``.
    """

    def __init__(self, root: Path, network: EmulatedNetwork) -> None:
        self.root = root
        self.network = network
        self.config = root / "ssh_config"
        self.ssh = f"ip netns exec {network.namespace(2)} ssh -F {self.config}"
        for key in ("key", "host_key"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(root / key)], check=True
            )
        shutil.copy(root / "key.pub", root / "authorized_keys")
        public = (root / "host_key.pub").read_text()
        addresses = [network.address(number) for number in range(len(NAMES))]
        (root / "known_hosts").write_text("".join(f"{address} {public}" for address in addresses))
        places = "".join(
            f"Host {name}\n    HostName {at}\n" for name, at in zip(NAMES, addresses, strict=True)
        )
        self.config.write_text(places + SSH.format(names=" ".join(NAMES), root=root))
        (root / "sshd_config").write_text(SSHD.format(root=root))
        # sshd changes to it; Debian makes it when it starts its own sshd.
        Path("/run/sshd").mkdir(exist_ok=True)
        for number, name in enumerate(NAMES):
            command = [
                str(_which("sshd")),
                "-D",
                "-E",
                str(root / f"sshd-{name}.log"),
                "-f",
                str(root / "sshd_config"),
            ]
            network.popen(number, command, as_worker=False)
        for name in NAMES:
            wait_for(lambda name=name: self.call(name, "true") == 0, what=f"the sshd of {name}")  # type: ignore[misc]

    def call(self, name: str, command: str) -> int:
        """Run a command on a host, and return its exit status."""
        return subprocess.run(
            [*self.ssh.split(), name, command], stderr=subprocess.DEVNULL
        ).returncode


@contextlib.contextmanager
def ssh_hosts(root: Path) -> Iterator[SshHosts]:
    """Start the hosts, and end them with all their processes."""
    root.mkdir(parents=True, exist_ok=True)
    with EmulatedNetwork(hosts=3, bandwidth="1gbit") as network:
        yield SshHosts(root, network)
