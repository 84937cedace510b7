"""Find the master, and start or stop the embedded master, which runs in the background.

A master is looked for in this order: ``--dashboard-url``, ``MLBENCH_MASTER_URL``, the cluster that
this user chose, the settings file, the embedded master that this user started last.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from mlbench_cli._client import MasterClient
from mlbench_cli._clusters.cloud import open_tunnel
from mlbench_cli._clusters.programs import last_line
from mlbench_cli._output import remark
from mlbench_core import files
from mlbench_core.calling_environment import module_command, safe_environment
from mlbench_core.client import settings
from mlbench_core.client.clusters import current_cluster
from mlbench_core.client.masters import MasterRecord, find_credentials, forget_master, read_record
from mlbench_core.client.rest import base_url
from mlbench_core.errors import (
    ConfigurationError,
    MasterError,
    MasterNotFoundError,
    MissingDependencyError,
)
from mlbench_core.paths import user_folder

__all__ = [
    "DEFAULT_HOST",
    "DEFAULT_PORT",
    "Location",
    "SilentMasterError",
    "connect",
    "find",
    "find_or_start",
    "stop_embedded",
]

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 5080
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 15.0
# Nobody looks after a master that a command started, so it must not run indefinitely.
END_WHEN_IDLE_S = 1800.0
_LOCK = "master.lock"
_ANSWER_S = 5.0
_PORTS_TRIED = 50


class Location(NamedTuple):
    """The address of a master, its token if it is known, and the source of the address."""

    url: str
    token: str | None
    source: str


class SilentMasterError(MasterError):
    """The embedded master runs, but does not answer; ``record`` is its record."""

    def __init__(self, record: MasterRecord, reason: str) -> None:
        super().__init__(
            f"the master at {record.url} (process {record.pid}) does not answer: {reason}"
        )
        self.record = record


def configured(dashboard_url: str | None = None) -> Location | None:
    """Return the master that the user named, or None.

    Args:
        dashboard_url: Value of ``--dashboard-url``.
    """
    token = os.environ.get("MLBENCH_TOKEN") or None
    named = dashboard_url or os.environ.get("MLBENCH_MASTER_URL")
    cluster = None if named else current_cluster()
    if cluster is not None:
        if cluster.provider != "kind":
            open_tunnel(cluster)
        # MLBENCH_TOKEN may be that of another master; the client finds the recorded one.
        return Location(cluster.url, None, f"the cluster {cluster.name}")
    for address, source in (
        (dashboard_url, "--dashboard-url"),
        (os.environ.get("MLBENCH_MASTER_URL"), "MLBENCH_MASTER_URL"),
        (settings.read(settings.SETTINGS).get("master_url"), settings.SETTINGS),
    ):
        if address:
            # If the user gave no token, the client looks for a recorded one and has the server
            # prove its identity.
            return Location(base_url(str(address)), token, source)
    return None


def embedded() -> Location | None:
    """Return the embedded master if it is running, else None.

    Raises:
        SilentMasterError: Its process is running, but it does not answer in time.
    """
    record = read_record()
    # A killed master leaves its record behind, and another program may have its process id or its
    # port by now.
    if record is None or not record.is_alive():
        return None
    # MLBENCH_TOKEN may be that of another master.
    location = Location(record.url, record.token, "the embedded master")
    try:
        if _answers(location):
            return location
    except TimeoutError as error:
        # Another program may have the process id by now, and yet another one the port.
        if _listens(record):
            raise SilentMasterError(record, _why_silent(record, str(error))) from None
    return None


def _why_silent(record: MasterRecord, reason: str) -> str:
    import psutil

    with contextlib.suppress(psutil.Error):
        if psutil.Process(record.pid).status() == psutil.STATUS_STOPPED:
            return (
                f"its process is stopped ('kill -CONT {record.pid}' continues it, "
                "'mlbench master --stop' ends it)"
            )
    return f"{reason} (is its disk or its machine overloaded? 'mlbench master --stop' ends it)"


def _listens(record: MasterRecord) -> bool:
    """Return True if the process of a record is this user's and listens on the recorded port."""
    import psutil

    try:
        process = psutil.Process(record.pid)
        if hasattr(os, "getuid") and process.uids().real != os.getuid():
            return False
        # The name of the method before psutil 6.
        sockets = getattr(process, "net_connections", None) or process.connections
        ports = {entry.laddr.port for entry in sockets("tcp") if entry.status == psutil.CONN_LISTEN}
    except psutil.Error:
        return False
    return urlsplit(record.url).port in ports


def find(dashboard_url: str | None = None) -> Location:
    """Return the location of the master.

    Args:
        dashboard_url: Value of ``--dashboard-url``.

    Returns:
        The location. A master that the user named is not contacted, so it may not be running.

    Raises:
        MasterNotFoundError: No master is named, and the embedded master is not running.
        SilentMasterError: The embedded master is running, but does not answer.
    """
    location = configured(dashboard_url) or embedded()
    if location is None:
        raise MasterNotFoundError(
            "no master is running: start one with 'mlbench master' (or 'mlbench run', which starts "
            "one when needed), or name one with --dashboard-url or MLBENCH_MASTER_URL"
        )
    return location


def connect(dashboard_url: str | None = None) -> MasterClient:
    """Return a client of the master that :func:`find` finds."""
    location = find(dashboard_url)
    return MasterClient(location.url, location.token)


def find_or_start(dashboard_url: str | None = None, engine: str | None = None) -> Location:
    """Return the location of the master; start the embedded one if none is named or running.

    The embedded master runs in the background. Two calls at the same time start only one.

    Args:
        dashboard_url: Value of ``--dashboard-url``.
        engine: The engine that the master must have; by default any, and ``local`` for a master
            that is started.

    Raises:
        ConfigurationError: The master has another engine.
        MasterError: The master did not start; the message has the last line of its log.
        MissingDependencyError: The master's packages are not installed.
    """
    location = configured(dashboard_url) or embedded()
    if location is not None:
        _check_engine(location, engine)
        return location
    check_installed()
    with files.lock(user_folder(_LOCK)):
        # Another command may have started it while this one waited for the lock.
        location = embedded()
        if location is not None:
            _check_engine(location, engine)
        else:
            location = _start(engine)
            remark(f"started the master: {location.url} (stop it with 'mlbench master --stop')")
            remark(f"it ends after {END_WHEN_IDLE_S / 60:g} minutes without a run or a request")
            remark(f"open it in a browser: {login_url(location)}")
    return location


def _check_engine(location: Location, engine: str | None) -> None:
    """Raise an error if a master has another engine than the wanted one."""
    if engine is None:
        return
    with MasterClient(location.url, location.token) as client:
        # Masters before this field had no other engine.
        current = client.health().get("engine", "local")
    if current != engine:
        cluster = current_cluster()
        if cluster is not None and location.url == cluster.url:
            instead = "use the master of this machine with 'mlbench set-cluster --none'"
        else:
            instead = "stop it with 'mlbench master --stop'"
        raise ConfigurationError(
            f"the master at {location.url} starts runs with the engine {current}, not {engine}: "
            f"{instead}, or name one with --dashboard-url that was started with --engine {engine}"
        )


def login_url(location: Location) -> str:
    """Return an address that logs a browser in once.

    Raises:
        MasterRequestError: The request failed or was refused.
    """
    with MasterClient(location.url, location.token) as client:
        return f"{location.url}{client.json(dict, 'POST', 'login/').get('path', '/')}"


def check_installed() -> None:
    """Raise an error unless the master and its packages can be imported.

    Raises:
        MissingDependencyError: A package is missing; the message has the pip command.
    """
    for package in ("fastapi", "jinja2", "uvicorn", "sqlalchemy", "psutil", "mlbench_master"):
        # Not imported here: the master runs in another process.
        if importlib.util.find_spec(package) is None:
            raise MissingDependencyError(
                f"the master needs the package '{package}', which is not installed: "
                "pip install 'mlbench-core[master]'"
            )


def master_command(host: str, port: int) -> list[str]:
    """Return the command of a master process, without secrets: all users can see arguments."""
    address = ("--host", host, "--port", str(port))
    return module_command(
        "mlbench_cli", "master", *address, "--end-when-idle", f"{END_WHEN_IDLE_S:g}"
    )


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As the master's own socket: without this option, old connections in TIME_WAIT make a free
        # port look used.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((DEFAULT_HOST, port))
        except OSError:
            return False
    return True


def _free_port() -> int:
    for port in range(DEFAULT_PORT, DEFAULT_PORT + _PORTS_TRIED):
        if _is_free(port):
            return port
    last = DEFAULT_PORT + _PORTS_TRIED - 1
    raise ConfigurationError(
        f"no port from {DEFAULT_PORT} to {last} is free; start one with 'mlbench master --port P'"
    )


def _start(engine: str | None) -> Location:
    while True:
        port = _free_port()
        try:
            return _start_at(port, engine)
        except MasterError:
            # Another program may have taken the port between the check and the start; any other
            # cause stays.
            if _is_free(port):
                raise


def _start_at(port: int, engine: str | None) -> Location:
    command = master_command(DEFAULT_HOST, port)
    if engine is not None:
        command = [*command, "--engine", engine]
    log = user_folder("master.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    # Other users must not read the log: it shows an address that logs a browser in.
    with open(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab") as output:
        os.chmod(log, 0o600)
        process = subprocess.Popen(
            command,
            env=safe_environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # Ctrl-C in this terminal must not end the master.
            start_new_session=True,
        )
    # The new process inherits MLBENCH_TOKEN; without it, the client finds the token in the record.
    token = os.environ.get("MLBENCH_TOKEN") or None
    location = Location(f"http://{DEFAULT_HOST}:{port}", token, "the embedded master")
    try:
        _await_health(process, location, log)
    # Ctrl-C too must not leave a master behind that nobody knows of.
    except BaseException:
        process.kill()
        process.wait()
        raise
    # The master outlives this process. Without a return code, Popen would warn that it left a child
    # running.
    process.returncode = 0
    return location


def _await_health(process: subprocess.Popen[bytes], location: Location, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    pause = threading.Event()
    while True:
        is_healthy = False
        with contextlib.suppress(TimeoutError):
            is_healthy = _answers(location, only_healthy=True)
        # Checked after the answer: if our process has ended, another server answered.
        if process.poll() is not None:
            text = log.read_text(encoding="utf-8", errors="replace")
            reason = last_line(text).strip() or "it wrote nothing"
            raise MasterError(f"the master ended at its start: {reason} (all of it: {log})")
        if is_healthy:
            return
        if time.monotonic() > deadline:
            raise MasterError(
                f"the master did not answer within {START_TIMEOUT_S:g} s; its log: {log}"
            )
        pause.wait(0.1)


def _answers(location: Location, only_healthy: bool = False) -> bool:
    """Return True if the server at an address proves to be the master of this user.

    Args:
        location: The address.
        only_healthy: False to accept a master that says that its database fails, as on a full disk.
            It still answers most requests.

    Raises:
        TimeoutError: It does not answer in time.
    """
    import requests

    # Without a record, another user's program could answer, and it would get the token.
    if find_credentials(location.url).key is None:
        return False
    with MasterClient(location.url, location.token, timeout_s=_ANSWER_S) as client:
        try:
            response = client.request("GET", "health/")
        except requests.RequestException as error:
            # The proof is demanded before the request, and its error is not one of requests.
            if isinstance(error, requests.Timeout) or "(TimeoutError)" in str(error):
                raise TimeoutError(f"no answer within {_ANSWER_S:g} s") from None
            return False
        if response.status_code == 503:
            return not only_healthy
        with contextlib.suppress(ValueError):
            answer = response.json()
            return response.ok and isinstance(answer, dict) and answer.get("status") == "ok"
    return False


def stop_embedded() -> Mapping[str, Any]:
    """Stop the embedded master, even if it does not answer.

    Its runs continue, and the next master takes them over.

    Returns:
        The ``url`` and the ``pid`` of the stopped master.

    Raises:
        MasterNotFoundError: No embedded master is running.
        MasterError: The master did not end in time, or its record names another process.
    """
    with files.lock(user_folder(_LOCK)):
        record = read_record()
        is_silent = False
        try:
            location = embedded()
        except SilentMasterError:
            location, is_silent = None, True
        if record is None or (location is None and not is_silent):
            # A master that was killed leaves its record behind.
            if record is not None and not record.is_alive():
                forget_master(record.pid)
            raise MasterNotFoundError("no embedded master is running")
        # The record may have been replaced, and then the process of its id is another one.
        if not _listens(record):
            raise MasterError(
                f"the record {user_folder(settings.MASTER)} has the address {record.url}, but "
                f"process {record.pid} does not listen there: find the process of the master, end "
                "it, and delete the record"
            )
        # The lock keeps other commands from starting a master while this one ends.
        _send(record, signal.SIGTERM)
        if is_silent and hasattr(signal, "SIGCONT"):
            # A process that is stopped ends only when it continues.
            _send(record, signal.SIGCONT)
        if not _has_ended(record, STOP_TIMEOUT_S):
            if not is_silent:
                raise MasterError(
                    f"the master (process {record.pid}) did not end within {STOP_TIMEOUT_S:g} s"
                )
            _send(record, getattr(signal, "SIGKILL", signal.SIGTERM))
            if not _has_ended(record, STOP_TIMEOUT_S):
                raise MasterError(
                    f"the master (process {record.pid}) cannot be ended: "
                    "its system call does not return"
                )
        forget_master(record.pid)
        return {"url": record.url, "pid": record.pid}


def _has_ended(record: MasterRecord, limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    pause = threading.Event()
    while record.is_alive():
        if time.monotonic() > deadline:
            return False
        pause.wait(0.05)
    return True


def _send(record: MasterRecord, number: signal.Signals) -> None:
    """Send a signal to the process of a record, but not to one that got its id a moment ago."""
    if not hasattr(signal, "pidfd_send_signal"):
        os.kill(record.pid, number)
        return
    try:
        # The descriptor stays that of one process, so no other one can take the id between the
        # check and the signal.
        descriptor = os.pidfd_open(record.pid)
    except ProcessLookupError:
        return
    try:
        if record.is_alive():
            signal.pidfd_send_signal(descriptor, number)
    finally:
        os.close(descriptor)
